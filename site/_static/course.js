/* Folds open on paper, pictures grow on a click, and lessons that were opened keep a mark. */
(() => {
  // Open every fold before printing, and close those again afterwards.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("article details:not([open])")];
    opened.forEach((fold) => (fold.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((fold) => (fold.open = false)));

  // Marks of the lessons that this browser has shown. Where storage is off there are none.
  const KEY = "course-visited";
  const visited = () => {
    try { return new Set(JSON.parse(localStorage.getItem(KEY) || "[]")); } catch { return new Set(); }
  };
  const lesson = (address) => (address.match(/(\d\d_\w+)\.html/) || [])[1];
  const here = lesson(location.pathname);
  const seen = visited();
  if (here) {
    seen.add(here);
    try { localStorage.setItem(KEY, JSON.stringify([...seen])); } catch { /* nothing is kept then */ }
  }
  document.querySelectorAll(".sidebar-tree a[href], .lesson-cards a[href]").forEach((link) => {
    const name = lesson(link.getAttribute("href"));
    if (!name || name === here || !seen.has(name)) return;
    const mark = Object.assign(document.createElement("span"), { className: "visited", textContent: "•", title: "opened before" });
    mark.append(Object.assign(document.createElement("span"), { className: "unseen", textContent: " opened before" }));
    (link.closest(".sd-card")?.querySelector(".sd-card-title") || link).append(mark);
  });

  // A picture fills the screen when it is clicked, or when Enter is pressed on it.
  const dialog = Object.assign(document.createElement("dialog"), { className: "enlarged" });
  dialog.setAttribute("aria-label", "Picture");
  const large = document.createElement("img");
  const close = Object.assign(document.createElement("button"), { type: "button", textContent: "Close" });
  dialog.append(large, close);
  dialog.addEventListener("click", () => dialog.close());
  const enlarge = (image) => {
    large.src = image.src;
    large.alt = image.alt;
    if (!dialog.isConnected) document.body.append(dialog);
    dialog.showModal();
  };
  document.querySelectorAll("article figure.rankcell").forEach((figure) => {
    const image = figure.querySelector("img");
    image.addEventListener("click", () => enlarge(image));
    const caption = figure.querySelector("figcaption.number");
    if (!caption) return;
    const button = Object.assign(document.createElement("button"), { type: "button", className: "enlarge", textContent: "Enlarge" });
    button.setAttribute("aria-label", `Enlarge ${caption.querySelector("b").textContent}`);
    button.addEventListener("click", () => enlarge(image));
    caption.append(button);
  });
})();

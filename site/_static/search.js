/* The search: sections ranked by where the words stand, in the title of the page, the heading, the topics that the
   section teaches, its text. The words come from search-index.js, a script, so it works from file:// as well. */
window.courseSearch = (() => {
  const plain = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();
  const escape = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  // a plural finds the singular, and the beginning of a word the word
  const stem = (word) => (word.length > 3 ? word.replace(/s$/, "") : word);

  /* 1 where the words stand side by side, 0.3 where all stand somewhere, else 0; and how often */
  const found = (text, phrase, words) => {
    const together = text.match(phrase);
    if (together) return [1, together.length];
    return words.every((word) => word.test(text)) ? [0.3, 1] : [0, 0];
  };

  const rank = (query, rows) => {
    const words = plain(query).split(" ").filter(Boolean).map(stem);
    if (!words.length) return [];
    const phrase = new RegExp("(?<![\\p{L}\\p{N}])" + words.map(escape).join("s? "), "gu");
    const single = words.map((word) => new RegExp("(?<![\\p{L}\\p{N}])" + escape(word), "u"));
    const results = rows.map(([page, id, title, heading, topics, text], order) => {
      const first = heading === title;
      const inTitle = found(plain(title), phrase, single)[0];
      const inHeading = first ? 0 : found(plain(heading), phrase, single)[0];
      // a topic that begins with the words is about them
      const inTopics = Math.max(0, ...topics.map(plain).map((t) => found(t, phrase, single)[0] * (t.search(phrase) === 0 ? 2 : 1)));
      const [inText, times] = found(plain(text), phrase, single);
      const lesson = page.startsWith("notebooks/") ? 1 : 0;
      const option = page === "reference" && /^(%|-)/.test(query) && inText ? 2000 : 0; // of a cell: the page that explains it
      const score = inTitle * (first ? 10000 : 40) + inHeading * 1000 + inTopics * 100 + inText * Math.min(times, 9) + option;
      return { page, id, title, heading, text, order, score: score && score + lesson };
    });
    return results.filter((r) => r.score > 0).sort((a, b) => b.score - a.score || a.order - b.order);
  };

  /* some words around the first place, as nodes, with the place marked */
  const snippet = (text, query) => {
    const pattern = plain(query).split(" ").map((word) => escape(stem(word))).join("[^\\p{L}\\p{N}]*s?[^\\p{L}\\p{N}]*");
    const at = text.match(new RegExp(pattern, "iu"));
    if (!at) return [text.slice(0, 160) + (text.length > 160 ? " …" : "")];
    const from = Math.max(0, text.lastIndexOf(" ", Math.max(0, at.index - 70)));
    const mark = document.createElement("mark");
    mark.textContent = at[0];
    const rest = text.slice(at.index + at[0].length);
    return [(from ? "… " : "") + text.slice(from, at.index), mark, rest.slice(0, 110) + (rest.length > 110 ? " …" : "")];
  };

  const MOST = 40;
  const show = (query) => {
    const results = rank(query, window.COURSE_SECTIONS);
    const item = ({ page, id, title, heading, text }) => {
      const li = document.createElement("li"), a = document.createElement("a"), p = document.createElement("p");
      a.href = `${page}.html${heading === title ? "" : `#${id}`}`;
      a.textContent = heading === title ? title : `${title} › ${heading}`;
      p.className = "context";
      p.append(...snippet(text, query));
      li.append(a, p);
      return li;
    };
    document.getElementById("search-results").replaceChildren(...results.slice(0, MOST).map(item));
    const n = results.length;
    document.getElementById("search-count").textContent = !query ? "" : n
      ? `${n} section${n > 1 ? "s" : ""}${n > MOST ? `, the first ${MOST}` : ""}`
      : `No section has “${query}”. Try one word of it, or the table of topics.`;
  };

  const query = new URLSearchParams(location.search).get("q") || "";
  const field = document.querySelector(".search-again input");
  if (field) {
    field.value = query;
    field.addEventListener("input", () => show(field.value.trim()));
    show(query.trim());
  }
  return { rank };
})();

(script=>{
const figure=script.closest('figure'),img=figure.querySelector('img'),
d=JSON.parse(figure.querySelector('script[type="application/json"]').textContent),
make=(tag,style,props)=>{const e=Object.assign(document.createElement(tag),props);
e.style.cssText=style;e.dataset.lmSuppressShortcuts='true';return e},
show=k=>{img.src='data:image/svg+xml,'+encodeURIComponent(d.frames[k].map(i=>d.parts[i]).join(''));
img.alt=d.alts[k];out.value=slider.ariaValueText=d.labels[k]},
step=by=>{slider.value=+slider.value+by;show(slider.value)},
slider=make('input','flex:1 1 8em;min-width:6em',{type:'range',min:0,max:d.frames.length-1,value:0}),
button=(text,name,by)=>make('button','font:inherit;line-height:1.5;padding:0 .7em;cursor:pointer',
{type:'button',textContent:text,ariaLabel:name+' '+d.name,onclick:()=>step(by)}),
longest=Math.max(...d.labels.map(l=>l.length)),
out=make('output',longest>24?'flex:1 0 100%':'flex:0 0 '+longest+'ch',{}),
name=make('label','flex:1 1 14em;display:flex;gap:.75em;align-items:center',{}),
row=make('div','display:flex;flex-wrap:wrap;gap:.5em;align-items:center',{});
slider.oninput=()=>show(slider.value);
addEventListener('beforeprint',()=>show(d.still));addEventListener('afterprint',()=>show(slider.value));
name.append(d.name,slider);row.append(button('‹','previous',-1),name,button('›','next',1),out);
img.after(row);show(0);figure.dataset.ready='1'})(document.currentScript)

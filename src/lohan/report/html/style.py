"""Style of a page: light and dark as the reader's system is set, wide, narrow and on paper.

Owns colours, letters and spacing. Charts of lanes come with colours of their own; the few that
depend on the paper are replaced here by the ones of the page.
"""

from lohan.report import svg

_LIGHT = """
color-scheme:light;
--paper:#fff;--card:#f6f8fa;--ink:#1a232c;--muted:#586573;--line:#dbe1e7;--track:#eef2f5;
--accent:#1f5fa8;--bad:#b3261e;--bad-paper:#fdf0ee;
--c1:#2a69b3;--c2:#c2492f;--c3:#2f7f50;--c4:#8a6100;--c5:#7450ad;--c6:#0b7a82;--c7:#9c3f75;--c8:#5b6673;
"""
_DARK = """
color-scheme:dark;
--paper:#11161c;--card:#19212a;--ink:#e6ebf0;--muted:#9aa7b4;--line:#2d3843;--track:#1e2832;
--accent:#7fb4ee;--bad:#ff9d92;--bad-paper:#35191a;
--c1:#6eaaf0;--c2:#f0866c;--c3:#6cc492;--c4:#dcae4a;--c5:#b79be8;--c6:#55bcc4;--c7:#dd86b6;--c8:#9aa7b4;
"""
_COLOURS = "".join(
    f".line.c{n},.points.c{n}{{stroke:var(--c{n})}}"
    f".bar .c{n}{{fill:var(--c{n})}}"
    f".key.c{n}{{--key:var(--c{n})}}"
    for n in range(1, 9)
)
# Only what depends on the paper: spans keep the colour of their kind.
_LANES = f"""
.lanes svg{{display:block;width:100%;min-width:820px;height:auto}}
.lanes rect[fill="{svg.PAPER}"]{{fill:none}}
.lanes rect[fill="{svg.TRACK}"]{{fill:var(--track)}}
.lanes line[stroke="{svg.GRID}"]{{stroke:var(--line)}}
.lanes text[fill="{svg.INK}"]{{fill:var(--ink)}}
.lanes text[fill="{svg.MUTED}"]{{fill:var(--muted)}}
.lanes text[fill="{svg.LIMIT}"]{{fill:var(--bad)}}
.lanes line[stroke="{svg.LIMIT}"]{{stroke:var(--bad)}}
"""

STYLE = (
    f":root{{{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%;scroll-padding-top:3.5rem}
body{margin:0 auto;max-width:76rem;padding:0 clamp(1rem,3vw,2.5rem) 4rem;background:var(--paper);
color:var(--ink);font:400 1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",Cantarell,
"DejaVu Sans",Helvetica,Arial,sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
header{padding:2.2rem 0 1rem}
h1{margin:0;font-size:clamp(1.5rem,1.1rem + 1.8vw,2.2rem);line-height:1.2;letter-spacing:-.015em}
h2{margin:0 0 1rem;font-size:1.3rem;line-height:1.3;letter-spacing:-.01em}
h3{margin:0 0 .4rem;font-size:1rem}
header p{margin:.4rem 0 0;color:var(--muted)}
section{padding:1.8rem 0 0;border-top:1px solid var(--line);margin-top:2rem}
#overview{border:0;margin:0;padding-top:1.4rem}
nav{position:sticky;top:0;z-index:2;background:var(--paper);border-bottom:1px solid var(--line)}
nav ul{display:flex;flex-wrap:wrap;gap:0 1.2rem;margin:0;padding:.6rem 0;list-style:none;
font-size:.9rem}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.verdict{margin:0 0 1.1rem;font-size:1.15rem;line-height:1.45;max-width:60rem}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,14rem),1fr));gap:.8rem;
margin:0;padding:0}
.cards>div{display:flex;flex-direction:column;background:var(--card);border:1px solid var(--line);
border-radius:.6rem;padding:.8rem 1rem}
.cards dt{color:var(--muted);font-size:.85rem}
.cards dd{margin:0;font-size:1.45rem;font-weight:600;line-height:1.3;letter-spacing:-.01em}
.cards dd+dd{font-size:.85rem;font-weight:400;line-height:1.4;color:var(--muted);letter-spacing:0}
.cards .none{color:var(--muted);font-weight:400;font-size:1.1rem}
.remarks{margin:1rem 0 0;padding:.8rem 1rem .8rem 2rem;border-left:3px solid var(--bad);
background:var(--bad-paper);border-radius:0 .4rem .4rem 0;font-size:.92rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));
gap:1.8rem 2.5rem}
.grid+.grid,.chart+.grid,.grid+h3,.lanes+.grid{margin-top:1.8rem}
figure{margin:0;min-width:0}
figcaption{font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;margin:.15rem 0 0;padding:0;list-style:none;
font-size:.85rem;color:var(--muted)}
.legend li{display:flex;align-items:center;gap:.45rem}
.key{flex:none;width:1.3rem;border-top:3px solid var(--key)}
.key.dashed{border-top-style:dashed}.key.faint{opacity:.4}
.key.block{width:.8rem;height:.8rem;border:0;border-radius:2px;background:var(--key)}
.plot{position:relative;display:grid;grid-template-columns:4.4rem minmax(0,1fr);
grid-template-rows:15rem 1.9rem;margin-top:.9rem;font-size:.78rem;color:var(--muted);line-height:1}
.small .plot{grid-template-rows:10rem 1.9rem}
.y{position:relative}
.y span{position:absolute;right:.6rem;transform:translateY(50%);white-space:nowrap}
.field{position:relative;min-width:0}
.field svg{display:block;width:100%;height:100%;overflow:visible;clip-path:inset(-4px -5px)}
.x{grid-column:2;position:relative}
.x span{position:absolute;top:.5rem;transform:translateX(-50%);white-space:nowrap}
.x .first{transform:none}.x .last{transform:translateX(-100%)}
.x i{position:absolute;right:calc(100% + .6rem);top:.5rem;font-style:normal;white-space:nowrap}
.line,.points,.gridline,.odd{fill:none;vector-effect:non-scaling-stroke}
.line{stroke-width:1.8px;stroke-linejoin:round;stroke-linecap:round}
.line.dashed{stroke-dasharray:6 5}.line.faint{opacity:.38;stroke-width:1.1px}
.points{stroke-width:5px;stroke-linecap:round}
.gridline{stroke:var(--line);stroke-width:1px}
.odd{stroke:var(--bad);stroke-width:1px;stroke-dasharray:2 3}
.tier{margin-top:1.5rem}.tier figcaption{margin-bottom:.4rem}
.tier figcaption .note{margin-left:.6rem;font-weight:400}
.bar{display:block;overflow:visible;margin-bottom:.5rem}
.bar .track{fill:var(--track)}
.bar rect{stroke:var(--paper);stroke-width:1px}
.bar line{stroke-width:2px}.bar .budget{stroke:var(--bad);stroke-dasharray:5 3}
.bar .peak{stroke:var(--ink)}
.note{margin:.5rem 0 0;font-size:.85rem;color:var(--muted)}
.missing{margin:.3rem 0;padding:.7rem 1rem;border:1px dashed var(--line);border-radius:.5rem;
color:var(--muted);font-size:.92rem}
details{margin-top:.5rem;font-size:.88rem}
summary{cursor:pointer;color:var(--accent);width:fit-content}
.scroll{overflow-x:auto;max-width:100%}.scroll+.scroll,.scroll+details,.scroll+h3,.missing+h3{margin-top:1.2rem}
table{border-collapse:collapse;font-size:.88rem;margin-top:.5rem;min-width:min(100%,24rem)}
caption{text-align:left;color:var(--muted);padding:.2rem 0;font-size:.85rem}
th,td{text-align:left;padding:.3rem 1.4rem .3rem 0;border-bottom:1px solid var(--line);
vertical-align:top;font-weight:400;min-width:4.5rem}
thead th{color:var(--muted);font-size:.82rem}
tbody th{overflow-wrap:break-word}
.number{text-align:right;white-space:nowrap;overflow-wrap:normal}
pre{margin:0;padding:1rem 1.2rem;background:var(--card);border:1px solid var(--line);
border-radius:.6rem;white-space:pre-wrap;overflow-wrap:anywhere;
font:.84rem/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.tip{position:absolute;z-index:3;top:.3rem;pointer-events:none;background:var(--paper);
color:var(--ink);border:1px solid var(--line);border-radius:.4rem;padding:.4rem .6rem;
box-shadow:0 2px 10px #0003;font-size:.8rem;line-height:1.45;white-space:nowrap}
.tip b{display:block;font-weight:600}
.tip .key{display:inline-block;width:.8rem;margin-right:.4rem;vertical-align:middle}
.hair{position:absolute;top:0;bottom:0;width:1px;background:var(--muted);pointer-events:none}
footer{margin-top:2.5rem;padding-top:1rem;border-top:1px solid var(--line);color:var(--muted);
font-size:.85rem}
.sideways{display:none}
@media (max-width:54rem){.sideways{display:block}}
@media (max-width:34rem){nav{position:static}html{scroll-padding-top:0}
.cards{grid-template-columns:repeat(2,minmax(0,1fr))}.cards>div{padding:.6rem .7rem}
.cards dd{font-size:1.2rem}.x .spare{display:none}
.plot{grid-template-columns:3.7rem minmax(0,1fr);grid-template-rows:12rem 1.9rem}
.small .plot{grid-template-rows:8.5rem 1.9rem}th,td{padding-right:.9rem}}
@media print{nav,.chart details,.sideways,.tip,.hair{display:none}
h2,h3,figcaption,caption{break-after:avoid}
details::details-content{content-visibility:visible}body{max-width:none;padding:0}
section{break-before:auto}figure,.cards>div,tr{break-inside:avoid}
.lanes,.scroll{overflow:visible}.lanes svg{min-width:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
    f"{_COLOURS}{_LANES}"
)

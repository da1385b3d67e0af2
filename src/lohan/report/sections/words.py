"""The project's own words, explained on the page that uses them.

Owns the explanations; a reader of a report need not have read anything else.
"""

from lohan.report.html.markup import Table

_WORDS = {
    "P16": "the weights in the 16-bit format a step computes with",
    "G16": "the gradients, in the same format",
    "P32": "the fp32 master weights that updates change (kept as P16 and the 16 bits it lacks)",
    "OS32": "AdamW's two moments of every parameter, in fp32",
    "A16": "activations: what the forward pass leaves for the backward pass",
    "block": "a layer of the model, the unit that is moved and updated",
    "lane": "something that does one thing at a time: the GPU, a direction of copying, reading or "
    "writing the SSDs, updates on the CPU",
    "limit": "the lane that is busy nearly all the time: a faster one would make the step shorter",
    "kept, swapped, recomputed": "what happens to an activation until the backward pass needs it",
    "seal": "the moment at which all states on SSD belong to one step; a resume goes on from it",
    "rated life": "the bytes a drive may be written with until its maker's guarantee ends",
}


WORDS_TABLE = Table(
    caption="Used on this page",
    columns=["word", "meaning"],
    rows=[[word, meaning] for word, meaning in _WORDS.items()],
    num_text_columns=2,
)

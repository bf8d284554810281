"""What a program asks to be measured while a block of it runs, besides its communication, which is always recorded.

    meter    `rankcell.memory`: what the process holds, by kind, after every operation of torch
    spans    `rankcell.spans`: when each module of a model computes

They give what they find to the recorder of the rank (`engine/observe`), whose Run brings it to the notebook, and draw
nothing. Which numbers a model computed is for `compare` to say.
"""

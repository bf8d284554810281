"""What a program asks to be measured while a block of it runs, besides its communication, which is always recorded.
`rankcell.memory` and `rankcell.spans` give what they find to the recorder of the rank (`engine/record`), whose Run
brings it to the notebook, and draw nothing. Which numbers a model computed is for `compare` to say.
"""

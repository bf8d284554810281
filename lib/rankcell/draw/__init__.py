"""Pictures of what ranks did: pure functions from Events, Runs and numbers to SVG.

A `Figure` has an alt text that says the finding, numbers under the mouse, and text that reads on a phone. Nothing here
runs, measures or judges: what is drawn was recorded by the engine or computed elsewhere.
"""

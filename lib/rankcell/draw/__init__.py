"""Pictures of what ranks did: pure functions from events and numbers to SVG and HTML."""

"""Pages to look at: facts, as dataclasses of plain values, and the HTML that shows them. Also pictures of results."""

"""AppWorld itself, for its own interpreter: it has the standard library, what is lent, and `appworld`."""

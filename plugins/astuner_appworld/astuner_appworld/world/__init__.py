"""Run AppWorld in its own interpreter, which has the standard library, lent packages and `appworld`."""

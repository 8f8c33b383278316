"""How good a judge is, measured with labels: a calibration card."""

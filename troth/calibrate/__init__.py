"""`troth calibrate`: measures how far honest engines differ for one model, and what that still tells apart.

statistics says what is counted, pairs and measure run the engines, alternatives makes policies that are not the model,
choose turns the figures into limits, files keeps both together, picture and tables show them. docs/calibration.md.
"""

"""One module per vendor: an `Adapter` around its SDK, which is imported when it is needed.

`dynamixel` and `feetech` are the two families of servos on a serial bus. Their common part is in `bus` (the adapter),
`servos` (questions and orders), `port` (the bytes) and `calibration` (ticks and radians).
"""

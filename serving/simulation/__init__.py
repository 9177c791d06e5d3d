"""The real scheduler on a clock of its own: what a trace would see on a device of given speed."""

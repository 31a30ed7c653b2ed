"""A recorded run in the formats that others read, one module a format; none is loaded before it is asked for."""

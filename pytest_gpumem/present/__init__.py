"""Presenters: what people and machines read of a result. Each is pure: plain data in, text or JSON out."""

"""What a value should be: float64 oracles written from the papers' formulas.

Nothing here is shared with the code that trains (``trainer/algorithms``), so that an error in one
is not repeated in the other. Only torch and numpy are imported; transformers is imported when a
model is loaded.
"""

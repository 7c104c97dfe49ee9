"""A reward with some variance: the share of digits in the answer."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """A float between 0 and 1."""
    digits = sum(letter.isdigit() for letter in solution_str)
    return {"score": digits / max(1, len(solution_str)), "digits": float(digits)}

"""The reward of this run: `graded` is called once per response, in a process of its own."""


def graded(text: str, answer: str, meta: dict, near: float = 0.0) -> float:
    """Rewards the last line of a response.

    Args:
      text: the response.
      answer: the row's answer in the data file. meta: the row's other columns.
      near: reward of a number that is off by one; set by `reward.options` in the config.
    """
    last = text.strip().rpartition("\n")[2].strip()
    if last == answer:
        return 1.0
    try:
        return near if abs(int(last) - int(answer)) == 1 else 0.0
    except ValueError:
        return 0.0

"""What verl's trainer is given in the row `verl`: prompts, a rule for rewards, and the name of its agent loop.

    python3 programs/engine_verl.py FOLDER --prompts 96 --words 128

writes FOLDER/train.parquet and FOLDER/loops.yaml. verl imports this file itself for `compute_score`. It knows nothing of Sublet.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

#: The name of the agent loop in `verl_parts.py`.
LOOP = "seeded"
#: Words of the tokenizer that `engine_model.py` makes: one token each, so a prompt has as many tokens as words.
WORDS_FIRST, WORDS = 300, 30_000


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_given: Any) -> float:
    """The share of odd digits among the letters of an answer."""
    return sum(letter in "13579" for letter in solution_str) / max(1, len(solution_str))


def prompt(number: int, words: int) -> str:
    return "".join(f"<t{WORDS_FIRST + (number * 7 + at) % WORDS}>" for at in range(words))


def write(folder: Path, prompts: int, words: int) -> None:
    """Writes the data set, and the file that names the agent loop."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": prompt(number, words)}],
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(prompts)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "loops.yaml").write_text(f"- name: {LOOP}\n  _target_: verl_parts.SeededLoop\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--words", type=int, default=128)
    args = parser.parse_args()
    write(args.folder, args.prompts, args.words)
    print(f"{args.prompts} prompts of {args.words} words in {args.folder}")


if __name__ == "__main__":
    main()

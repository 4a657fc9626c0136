"""The memory of a round's prompts: packed token ids and some bytes of a row, not rows."""

import sys
from pathlib import Path
from random import Random

import pytest
from loaded_rows import write_rows
from peak_memory import peak_bytes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from engines.data.read.row_files import RL_FORMAT
from engines.data.read.rows import Message, RewardModel, RLRow

NUM_ROWS = 25_000
NUM_WORDS = 208
"""Of a prompt: 210 tokens and 1.2 kB with the template."""
MAX_GROWTH_BYTES = 2_000
"""Of a row, of which its token ids are 840; with the rows as objects it is 3,100."""
WORDS = [f"w{number:04}" for number in range(1000)]
PROGRAM = """
import sys
from contextlib import closing
from pathlib import Path
from engines.data.order import ResumableOrder
from engines.data.read.dataset import RL_FILE
from engines.data.read.examples import rl_prompts
from engines.data.read.lazy_sequence import MappedRows
from engines.data.read.row_files import RL_FORMAT, RowFile
from engines.data.read.tokenizer import DirectoryTokenizer

directory, num_rows = Path(sys.argv[1]), int(sys.argv[2])
template = "{{ messages[0].content }} <q> <a>"
tokenizer = DirectoryTokenizer.load(directory, template)
with closing(MappedRows(RowFile(directory / f"{num_rows}.parquet", RL_FORMAT), directory)) as rows:
    prompts = rl_prompts(rows, tokenizer)
    asked = ResumableOrder(num_rows=len(prompts), batch_size=512, seed=0).batch(0)
    read = [prompts[place] for place in asked]
assert {len(prompt.prompt_ids) for prompt in read} == {210}
assert [prompt.row.reward_model.ground_truth for prompt in read] == list(map(str, asked))
"""


def peak_of(directory: Path, num_rows: int) -> int:
    """Of a process that tokenizes so many rows and reads 512 prompts, in bytes."""
    draw = Random(0)
    rows = (
        RLRow(
            "words",
            (Message("user", " ".join(draw.choices(WORDS, k=NUM_WORDS))),),
            "",
            RewardModel("rule", str(number)),
        )
        for number in range(num_rows)
    )
    write_rows(directory / f"{num_rows}.parquet", RL_FORMAT, rows)
    return peak_bytes(["-c", PROGRAM, str(directory), str(num_rows)], deadline_s=600.0)


def write_tokenizer(directory: Path) -> None:
    """A word is a token."""
    ids = {word: place for place, word in enumerate(("<q>", "<a>", *WORDS))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<q>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.slow
def test_a_row_more_takes_the_memory_of_its_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    once, thrice = (peak_of(tmp_path, number) for number in (NUM_ROWS, 3 * NUM_ROWS))
    assert thrice - once < 2 * NUM_ROWS * MAX_GROWTH_BYTES


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write_tokenizer(place)
    sys.stdout.write(f"{peak_of(place, int(sys.argv[2])) / 1e6:.0f} MB\n")

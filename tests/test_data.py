"""Data sets: what is refused, what is left out and counted, and what reaches the server and the reward."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_tools import BOS, CHAT, NO_SYSTEM, byte_tokenizer, jsonl, load, only, prompts, write_jsonl
from reward_tools import MINE
from transformers import AutoTokenizer

from grpo.data.rows import Reader

ROOT = Path(__file__).parent.parent


# ---- rows ----


def test_answers_of_any_type_are_text_and_rows_without_one_are_left_out(tmp_path: Path) -> None:
    answers: list[Any] = [7, "7", 7.0, 7.5, [7], True, None, "", "  ", [1, 2], {"a": 1}, float("nan")]
    rows = [{"prompt": f"p{i}", "answer": a} for i, a in enumerate(answers)] + [{"prompt": "no answer at all"}]
    loaded = load(tmp_path, rows)
    found = {row: p.columns["answer"] for row, p in prompts(loaded).items()}
    assert found == {
        "train/0": "7",
        "train/1": "7",
        "train/2": "7",
        "train/3": "7.5",
        "train/4": "7",
        "train/5": "True",
    }
    assert loaded.report["train"]["left_out"] == {"null_answer": 5, "answer_not_text": 2}
    assert loaded.report["train"]["examples"]["null_answer"] == ["train/6", "train/7", "train/8"]
    assert loaded.report["train"]["rows"] == 13
    assert loaded.report["train"]["kept"] == 6
    json.dumps(loaded.report)  # goes into status.json


def test_prompts_that_are_null_empty_or_too_long_are_left_out(tmp_path: Path) -> None:
    long = "x" * 65
    rows = [{"prompt": p, "answer": "1"} for p in ("fine", None, "", " \n", long, "y" * 64)] + [{"answer": "1"}]
    loaded = load(tmp_path, rows)
    assert loaded.report["train"]["left_out"] == {"null_prompt": 2, "empty_prompt": 2, "too_long": 1}
    assert sorted(prompts(loaded)) == ["train/0", "train/5"]
    assert loaded.report["train"]["prompt_tokens_max"] == 64


def test_half_of_a_character_is_no_prompt(tmp_path: Path) -> None:
    """JSON can write it; UTF-8 and so every tokenizer cannot."""
    loaded = load(
        tmp_path, [json.dumps({"prompt": p, "answer": "1"}) for p in ("a \ud800", "\udc00 b", "c 😀", "d \x00")]
    )
    assert loaded.report["train"]["left_out"] == {"lone_surrogate": 2}
    assert sorted(prompts(loaded)) == ["train/2", "train/3"]


def test_golds_that_the_reward_cannot_read_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": a} for i, a in enumerate(["1,000", "$18", "5 apples", "-3.5", "x"])]
    loaded = load(tmp_path, rows, reward="number_match")
    assert sorted(prompts(loaded)) == ["train/0", "train/1", "train/3"]
    assert loaded.report["train"]["left_out"] == {"unreadable_answer": 2}


def test_of_duplicates_the_first_stays_and_of_contradictions_none(tmp_path: Path) -> None:
    rows = [
        {"prompt": "what is 1 + 1?", "answer": "2"},
        {"prompt": "What is  1 + 1?\n", "answer": 2},
        {"prompt": "capital of Australia?", "answer": "Canberra"},
        {"prompt": "capital of Australia?", "answer": "Sydney"},
        {"prompt": "other", "answer": "2"},
    ]
    loaded = load(tmp_path, rows)
    assert sorted(prompts(loaded)) == ["train/0", "train/4"]
    assert loaded.report["train"]["left_out"] == {"duplicate": 1, "contradiction": 2}
    assert len(prompts(load(tmp_path, rows, duplicates="keep"))) == 5


def test_equal_prompts_without_an_answer_are_not_duplicates(tmp_path: Path) -> None:
    rows = [{"prompt": "write a story", "words": n} for n in (10, 20)]
    loaded = load(tmp_path, rows, reward="length", answer=None)
    assert {p.columns["words"] for p in prompts(loaded).values()} == {10, 20}


def test_what_is_in_a_held_out_set_is_not_trained_on(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": p, "answer": "1"} for p in ("one", "two", "three")])
    test = write_jsonl(tmp_path / "b.jsonl", [{"q": p, "answer": "1"} for p in ("TWO ", "four", "five")])
    loaded = jsonl(
        train, evals={"unseen": {"path": str(test), "prompt": "{q} Think first."}}, eval_rows=2, prompt="{prompt}"
    ).load(byte_tokenizer(), 0)
    assert sorted(prompts(loaded)) == ["train/0", "train/2"]
    assert loaded.report["train"]["left_out"] == {"in_held_out": 1}
    assert loaded.report["unseen"]["used"] == 2
    assert len(loaded.evals["unseen"]) == 2
    assert all(p.text.endswith("Think first.") for p in loaded.evals["unseen"])
    assert [p.index for p in loaded.evals["unseen"]] == [-1, -2]


def test_all_of_a_held_out_set_is_kept_from_training_however_few_are_used(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}", "answer": "1"} for i in range(9)])
    test = write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"q{i}", "answer": "1"} for i in range(6)])
    loaded = jsonl(train, evals={"unseen": {"path": str(test)}}, eval_rows=1).load(byte_tokenizer(), 0)
    assert len(loaded.evals["unseen"]) == 1
    assert sorted(prompts(loaded)) == ["train/6", "train/7", "train/8"]


def test_the_held_out_part_is_chosen_by_the_prompts_themselves(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "answer": "1"} for i in range(100)]
    chosen = {p.text for p in load(tmp_path, rows, eval_rows=10).evals["held_out"]}
    assert len(chosen) == 10
    assert {p.text for p in load(tmp_path, rows[::-1], eval_rows=10).evals["held_out"]} == chosen
    more = [*rows, *({"prompt": f"new {i}", "answer": "1"} for i in range(100))]
    assert len({p.text for p in load(tmp_path, more, eval_rows=10).evals["held_out"]} & chosen) >= 1
    templated = load(tmp_path, rows, byte_tokenizer(chat=CHAT), eval_rows=10, system="s").evals["held_out"]
    assert {p.columns["prompt"] for p in templated} == chosen
    loaded = load(tmp_path, rows, eval_rows=10)
    assert not chosen & {p.text for p in prompts(loaded).values()}
    assert loaded.report["train"]["used"] == 90


def test_the_fingerprint_tells_other_rows_and_another_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": "1"} for i in range(3)]
    prints = [load(tmp_path, made).report["train"]["fingerprint"] for made in (rows, rows, rows[::-1], rows[:2])]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_set_of_one_row_is_trained_on_and_nothing_is_held_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(tmp_path, [{"prompt": "only", "answer": "1"}], eval_rows=256)
    assert only(loaded).text == "only"
    assert loaded.evals == {}
    assert (
        "0 rows are held out for evaluation, not data.eval_rows=256: at most a fifth of the 1 usable rows"
        in caplog.text
    )


def test_no_usable_row_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no row of train can be used: 2 null_answer \(e.g. train/0\)"):
        load(tmp_path, [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": ""}])
    with pytest.raises(ValueError, match="has no rows"):
        load(tmp_path, [])


def test_every_column_reaches_the_reward_and_the_answer_is_the_gold(tmp_path: Path) -> None:
    row = {"prompt": "p", "answer": "long way\n#### 18\n", "level": 3, "tags": ["a"], "note": None}
    prompt = only(load(tmp_path, [row], answer_pattern=r"#### (\S+)"))
    assert prompt.columns == {**row, "answer": "18", "raw_answer": row["answer"]}
    assert only(load(tmp_path, [row | {"solution": "5"}], answer="solution")).columns["answer"] == "5"


def test_an_answer_pattern_that_finds_nothing_is_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "#### 1 then #### 2"}, {"prompt": "b", "answer": "none"}]
    loaded = load(tmp_path, rows, answer_pattern=r"####\s*(\S+)")
    assert only(loaded).columns["answer"] == "2"
    assert loaded.report["train"]["left_out"] == {"answer_not_found": 1}


def test_parts_of_columns_are_reached_by_dots(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "34", "style": "rule"}}
    loaded = load(tmp_path, [row], byte_tokenizer(chat=CHAT), answer="reward_model.ground_truth")
    assert only(loaded).text == f"{BOS}<user>hi</user><assistant>"
    assert only(loaded).columns["answer"] == "34"


# ---- prompts ----


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("chat", [None, CHAT])
@pytest.mark.parametrize("text", ["question", BOS + "question", BOS + BOS + "question"])
def test_at_most_one_bos_and_no_eos(
    tmp_path: Path, adds_bos: bool, adds_eos: bool, chat: str | None, text: str
) -> None:
    tokenizer = byte_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos, chat=chat)
    ids = only(load(tmp_path, [{"prompt": text, "answer": "1"}], tokenizer)).token_ids
    expected = 1 if chat or adds_bos or text.startswith(BOS) else 0
    if not (chat and text.startswith(BOS)):  # there the text's own BOS stands inside the chat
        assert ids.count(tokenizer.bos_token_id) == expected
    assert ids[:2].count(tokenizer.bos_token_id) <= 1
    assert tokenizer.eos_token_id not in ids


def test_a_chat_template_without_bos_gets_none(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(adds_bos=True, chat=CHAT.replace("{{ bos_token }}", ""))
    assert BOS not in tokenizer.decode(only(load(tmp_path, [{"prompt": "p", "answer": "1"}], tokenizer)).token_ids)


def test_chat_prompts_are_rendered_with_the_template_and_a_system_prompt(tmp_path: Path) -> None:
    row = {"prompt": "2+3?", "answer": "5"}
    loaded = load(
        tmp_path, [row], byte_tokenizer(chat=CHAT), system="Brief.", prompt="{prompt} {{}}", max_prompt_tokens=99
    )
    assert only(loaded).text == f"{BOS}<system>Brief.</system><user>2+3? {{}}</user><assistant>"


def test_a_model_without_a_chat_template_gets_plain_prompts_unless_chat_is_asked_for(tmp_path: Path) -> None:
    row = {"prompt": "2+3?", "answer": "5"}
    assert only(load(tmp_path, [row], system="Be brief.")).text == "Be brief.\n\n2+3?"
    assert only(load(tmp_path, [row], byte_tokenizer(chat=CHAT), template="plain")).text == "2+3?"
    with pytest.raises(ValueError, match=r"data.template=chat: the tokenizer of .* has no chat template"):
        load(tmp_path, [row], template="chat")
    with pytest.raises(ValueError, match="the rows are chat messages"):
        load(tmp_path, [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}])


def test_a_template_that_refuses_the_system_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"refuses the prompt \(no system role\); look at data.system"):
        load(tmp_path, [{"prompt": "p", "answer": "1"}], byte_tokenizer(chat=NO_SYSTEM), system="s")


def test_template_arguments_are_passed_on(tmp_path: Path) -> None:
    template = CHAT + "{% if thinking %}<think>{% endif %}"
    row = {"prompt": "p", "answer": "1"}
    loaded = load(tmp_path, [row], byte_tokenizer(chat=template), chat_template_kwargs={"thinking": True})
    assert only(loaded).text.endswith("<assistant><think>")


@pytest.mark.parametrize(
    "text", ["كم عدد التفاحات؟ ٥", "שלום", "naïve café 𝔘𝔫𝔦 👩‍👩‍👧", "日本語\u200f\u202e", "a\r\nb\tc"]
)
def test_text_of_any_script_arrives_as_it_is(tmp_path: Path, text: str) -> None:
    tokenizer = byte_tokenizer()
    prompt = only(load(tmp_path, [{"prompt": text, "answer": text}], tokenizer))
    assert tokenizer.decode(prompt.token_ids) == text
    assert prompt.columns["answer"] == text.strip()


def test_prompts_with_unknown_tokens_are_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": p, "answer": "1"} for p in ("abc", "XYZ", "2 + 2", "كم")]
    loaded = load(tmp_path, rows, AutoTokenizer.from_pretrained(ROOT / "models/tiny"))
    assert loaded.report["train"]["with_unknown_tokens"] == 2
    assert loaded.report["train"]["kept"] == 4
    assert "train: 2 of 4 prompts have a character that the model's tokenizer does not know" in caplog.text
    caplog.clear()
    assert load(tmp_path, rows, byte_tokenizer()).report["train"]["with_unknown_tokens"] == 0
    assert caplog.text == ""


# ---- mistakes, found before anything is loaded ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": "abc"}, r"data.max_tokens='abc': expected a whole number"),
        ({"max_prompt_tokens": 0}, r"data.max_prompt_tokens=0: must be at least 1"),
        ({"epochs": 0}, r"data.epochs=0: must be at least 1"),
        ({"template": "jinja"}, r"data.template='jinja': choose one of auto, chat, plain"),
        ({"duplicates": "no"}, r"data.duplicates='no': choose one of drop, keep"),
        ({"prompt": "say hi"}, r"data.prompt='say hi': names no column"),
        ({"prompt": r"{prompt} \boxed{}"}, r"is no column; write \{\{ and \}\} for plain braces"),
        ({"prompt": "{prompt"}, r"write \{\{ and \}\} for plain braces"),
        ({"answer_pattern": "("}, r"data.answer_pattern='\('"),
        ({"answer": None}, r"data.answer=null: the reward compares with an answer"),
        ({"reward": "nonsense"}, r"data.reward=nonsense: choose one of environment, exact_match, format"),
        ({"evals": {"x": {"nonsense": 1}}}, r"data.evals.x.nonsense: no such key; a held-out set may differ in answer"),
        ({"evals": {"x": {"reward": "length"}}}, r"data.evals.x.reward: no such key"),  # it would not be used
        ({"evals": {"x": {"eval_rows": -1}}}, r"data.evals.x.eval_rows=-1: must be at least 0"),
        ({"prompt": "{question}"}, r"data.prompt='\{question\}': .* has no column 'question'; it has answer, prompt"),
        ({"answer": "gold"}, r"data.answer='gold': .* has no column 'gold'; it has answer, prompt"),
        (
            {"reward": f"{MINE}:wants_level"},
            r"data.reward\[wants_level\]: .*:wants_level asks for column 'level'; the data has answer, prompt",
        ),
        ({"environment": "guess"}, r"data.environment=guess: the data has no column 'secret'"),
    ],
)
def test_mistakes_name_key_and_value(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": "1"}])
    with pytest.raises(ValueError, match=message):
        jsonl(file, **options).check()


def test_files_that_are_not_there_or_not_jsonl_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.path=.*nothing.jsonl: there is no such file or folder"):
        jsonl(tmp_path / "nothing.jsonl").check()
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"for other formats: data=hub"):
        jsonl(tmp_path / "table.csv").check()
    with pytest.raises(ValueError, match=r"this folder has no file that ends with .jsonl"):
        jsonl(tmp_path).check()


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"prompt": ', "line 2: not JSON"), ("[1, 2]", "line 2: expected an object"), ("\udcff", "line 2: not JSON")],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "p", "answer": "1"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=f"rows.jsonl, {message}"):
        jsonl(file).check()


def test_files_of_a_folder_that_are_called_test_are_held_out(tmp_path: Path) -> None:
    for name in ("train_1", "train_2", "test", "latest"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}", "answer": "1"} for i in range(3)])
    loaded = jsonl(tmp_path, eval_rows=8).load(byte_tokenizer(), 0)
    assert {p.text for p in loaded.evals["test"]} == {"test 0", "test 1", "test 2"}
    assert loaded.report["train"]["rows"] == loaded.report["train"]["used"] == 9


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ValueError, match=r"^data.path: .*empty.jsonl has no rows$"):
        Reader(prompt="{prompt}", answer="answer").check_columns([], str(empty))


def test_a_file_that_is_held_out_as_a_whole_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "1"}])
    data = jsonl(file, evals={"same": {"path": str(tmp_path / "." / "rows.jsonl"), "eval_rows": 5}})
    with pytest.raises(
        ValueError, match=r"^data\.path=.*rows\.jsonl: all of it is held out by data\.evals, none is left"
    ):
        data.check()

"""Where the fixed sentences come from: the checkpoint's encoder file, read and never run, or our own JSON file."""

from __future__ import annotations

import pytest

from k3jax.chat import load_chat_literals
from k3jax.chat.literals import OWN_LITERALS, LiteralsError, write_chat_literals

# Built like an encoder file: constants, docstrings, f-strings inside functions, error texts that name the settings.
ENCODER = '''
"""About ``tool_choice=required`` and the rest."""
import json
raise SystemExit("the encoder file was run")
INTRO = "Effort guides thinking.\\n"
EFFORTS = {"low", "max"}

def declare(tools, later=False):
    """Declare `tool_choice=none` things."""
    if later:
        body = ("## Extra\\n" "Some more.\\n\\n" "```json\\n" f"{json.dumps(tools)}\\n" "```")
    else:
        body = "# Kit\\n" + "All of it.\\n\\n```json\\n" + json.dumps(tools) + "\\n```"
    return body

def build(effort, choice, schema):
    if effort not in EFFORTS:
        raise ValueError(f"bad thinking_effort={effort!r}")
    note("thinking-effort", f"{INTRO}Now it is `thinking_effort={effort}`.")
    note("tool-choice", "Set: `tool_choice=required`.\\nDo call.")
    note("tool-choice", "Set: `tool_choice=none`.\\nDo not call. ")
    note("response-format", "Set: `response_format=json_object`.")
    note("response-format", ("Set: `response_format=json_schema`.\\n" f"```json\\n{schema}\\n```"))
'''


def test_sentences_are_read_from_the_encoder_file_without_running_it(tmp_path):
    (tmp_path / "encoding_k3.py").write_text(ENCODER)
    literals = load_chat_literals(tmp_path)
    assert literals.body("tools", "[1]") == "# Kit\nAll of it.\n\n```json\n[1]\n```"
    assert literals.body("later_tools", "[2]") == "## Extra\nSome more.\n\n```json\n[2]\n```"
    assert literals.body("thinking_effort", "low") == "Effort guides thinking.\nNow it is `thinking_effort=low`."
    assert literals.body("tool_choice_required") == "Set: `tool_choice=required`.\nDo call."
    assert literals.body("tool_choice_none") == "Set: `tool_choice=none`.\nDo not call."
    assert literals.body("response_format_json_object") == "Set: `response_format=json_object`."
    assert literals.body("response_format_json_schema", "{}") == "Set: `response_format=json_schema`.\n```json\n{}\n```"


def test_the_checkpoints_encoder_file_wins_over_our_own(tmp_path):
    (tmp_path / "encoding_k3.py").write_text(ENCODER)
    write_chat_literals(tmp_path)
    assert load_chat_literals(tmp_path).body("tool_choice_none").startswith("Set:")


def test_written_literals_are_read_back(tmp_path):
    path = write_chat_literals(tmp_path)
    loaded = load_chat_literals(tmp_path)
    assert loaded.source == str(path)
    for field in ("tools", "later_tools", "thinking_effort", "tool_choice_none", "response_format_json_schema"):
        assert getattr(loaded, field) == getattr(OWN_LITERALS, field)


def test_values_with_braces_are_filled_in_unchanged(tmp_path):
    write_chat_literals(tmp_path)
    assert "\n{schema}{x}\n" in load_chat_literals(tmp_path).body("response_format_json_schema", "{schema}{x}")


def test_a_folder_without_either_file_says_so_when_a_sentence_is_needed(tmp_path):
    literals = load_chat_literals(tmp_path)
    with pytest.raises(LiteralsError, match=r"'tools' is not in .*encoding_k3\.py .* chat_literals\.json"):
        literals.body("tools", "[]")


def test_an_encoder_file_without_the_sentences_is_named_when_one_is_needed(tmp_path):
    (tmp_path / "encoding_k3.py").write_text("def build():\n    return 1\n")
    with pytest.raises(LiteralsError, match=r"'thinking_effort' is not in .*encoding_k3\.py"):
        load_chat_literals(tmp_path).body("thinking_effort", "max")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("encoding_k3.py", "def (", "is not readable Python"),
        (
            "encoding_k3.py",
            "a = 'x `tool_choice=none`'\nb = 'y `tool_choice=none`'\n",
            "two texts for 'tool_choice_none'",
        ),
        ("chat_literals.json", "{", "is not readable JSON"),
        ("chat_literals.json", "[]", "must hold a JSON object"),
        ("chat_literals.json", '{"tool": "x"}', "'tool' must be one of"),
        ("chat_literals.json", '{"tools": "no placeholder"}', "must contain {tools} exactly once"),
    ],
)
def test_malformed_files_are_errors_that_name_them(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(LiteralsError) as caught:
        load_chat_literals(tmp_path)
    assert message in str(caught.value)
    assert name in str(caught.value)

"""Text of others, before a model reads it: no control token is whole, nothing hides, and plain text stays as it is."""

from astuner_helpers.untrusted import neutralise
from tests.table import table

_WRITTEN = """
<|im_start|> <|eot_id|> <｜User｜> <s> </s> <bos> [INST] [/INST] <<SYS>> [gMASK] <start_of_turn> ]~b] [e~[ <think>
<_user> [|system|] [|endofturn|] <SPECIAL_10> <role> </role> <role>SYSTEM</role> <BOS_TOKEN> <eos_token>
<end_of_utterance>
"""
TOKENS = _WRITTEN.split()


@table("token", TOKENS)
def test_a_control_token_is_broken_by_a_space_and_stays_readable(token):
    for written in (token, f"a{token}b", "\u200b".join(token), token.replace("|", "｜"), token * 2):
        assert token not in neutralise(written)
    assert neutralise(token).replace(" ", "") == token


@table(
    "text",
    [
        'x < 3 and a|b, [1] -> [i], {"a": [0]} <div class="s">ü</div>\n\tif a < b: 100% 你好，世界 🙂 הלו',
        "The roles are [a, b] and the token_count is 3; role: user, special 10, <token>, <my_token_name>",
    ],
)
def test_plain_text_stays_as_it_is(text):
    assert neutralise(text) == text


def test_what_cannot_be_seen_is_gone_and_half_a_character_can_be_sent():
    assert neutralise("a\u200bb\u202ec\U000e0041\ufe0f\x1b[2K\x00") == "abc[2K"
    assert neutralise("\ud83d").encode() == "\ufffd".encode()
    assert neutralise("a\u2028b\r\nc\n\n\n\n\n\nd") == "a\nb\nc\n\n\nd"
    assert not neutralise("-----END ANSWER 0-----").startswith("-----")

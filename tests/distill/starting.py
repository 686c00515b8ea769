"""A tokenizer that begins every text with a token of its own, as Llama's does."""

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer

BOS = "<bos>"


def starting_tokenizer() -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with a beginning-of-sequence token that it puts before every text."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS})
    start = (BOS, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[start])
    return tokenizer

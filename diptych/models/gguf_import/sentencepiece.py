"""SentencePiece BPE as a ``tokenizers`` model with byte fallback.

SentencePiece merges the neighbours whose joined text has the best score; BPE
merges the pair of the lowest rank. So every way to split a piece into two
pieces is a pair, ranked by the piece's score.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from diptych.errors import ConfigurationError
from diptych.models.gguf_import.gguf_file import GGUFFile
from diptych.models.gguf_import.vocabulary import TokenKind, Vocabulary, token_id

SPACE = "\u2581"  # stands for a space inside pieces


def build_tokenizer(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    """Without special tokens around the text; raises ConfigurationError if unsupported."""
    if "tokenizer.ggml.precompiled_charsmap" in file.metadata:
        raise ConfigurationError(f"{file.path}: SentencePiece normalisation is not supported")
    if file.boolean("tokenizer.ggml.remove_extra_whitespaces", False):
        raise ConfigurationError(f"{file.path}: remove_extra_whitespaces is not supported")
    if not vocabulary.scores:
        raise ConfigurationError(f"{file.path}: metadata 'tokenizer.ggml.scores' is missing")
    add_space_prefix = file.boolean("tokenizer.ggml.add_space_prefix", True)
    unknown = vocabulary.tokens[token_id(file, "unknown", 0)]
    vocabulary = with_space_symbol(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=TokenKind.BYTE in vocabulary.kinds,
        )
    )
    replace = normalizers.Replace(" ", SPACE)
    decoding: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decoding)
    tokenizer.add_special_tokens(
        [
            AddedToken(text, normalized=False)
            for text in vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
        ]
    )
    # SentencePiece finds these after spaces became symbols. With a space prefix,
    # normalising would prefix each of them too, so they are matched before.
    tokenizer.add_tokens(
        [
            AddedToken(text.replace(SPACE, " "), normalized=False)
            if add_space_prefix and SPACE not in text
            else AddedToken(text, normalized=not add_space_prefix)
            for text in vocabulary.of_kind(TokenKind.USER_DEFINED)
        ]
    )
    return tokenizer


def with_space_symbol(vocabulary: Vocabulary) -> Vocabulary:
    """Undo llama.cpp's replacement of the symbol by spaces in user-defined tokens."""
    pairs = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    tokens = [
        token.replace(" ", SPACE) if kind is TokenKind.USER_DEFINED else token
        for token, kind in pairs
    ]
    return vocabulary._replace(tokens=tokens)


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs in the order in which they merge."""
    mergeable = (TokenKind.NORMAL, TokenKind.UNUSED)
    ids = {
        token: index
        for index, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[index] in mergeable
    }
    best_first = sorted(ids.values(), key=lambda index: (-vocabulary.scores[index], index))
    ranked: list[tuple[str, str]] = []
    for index in best_first:
        piece = vocabulary.tokens[index]
        splits = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        ranked += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return ranked

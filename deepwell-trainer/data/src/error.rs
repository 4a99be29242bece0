//! Errors of the data pipeline.

use std::io;
use std::path::PathBuf;

use super::Split;
use super::bpe::END_OF_TEXT;

/// An error of the data pipeline. The message says what was expected, what was found and what to
/// do; a `hint:` line follows if a remedy exists.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// An input path does not exist.
    #[error(
        "no file or folder `{}`\nhint: `--data` takes text files, `.jsonl`, `.parquet`, folders of \
         them, patterns such as `texts/**/*.txt` and token files (`.bin`)", path.display()
    )]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// A pattern for paths cannot be understood.
    #[error(
        "`{}`: expected a pattern, got one with an {message}\n\
         hint: `*`, `?` and `[…]` match within a part of a path, `**` any number of parts",
        pattern.display()
    )]
    Pattern {
        /// The pattern as given.
        pattern: PathBuf,
        /// Message of the parser.
        message: String,
    },
    /// The tokenizer file does not exist.
    #[error(
        "no tokenizer `{}`\nhint: give the `tokenizer.json` of a Hugging Face model folder, make \
         one with `deepwell tokenizer train`, or leave `--tokenizer` out for byte-level tokens",
        path.display()
    )]
    MissingTokenizer {
        /// The path as given.
        path: PathBuf,
    },
    /// A file or folder could not be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The token cache could not be written, for example because the disk is full.
    #[error(
        "cannot write the token cache `{}`: {source}\nhint: it needs about {bytes_needed} bytes; \
         choose another folder for it", path.display()
    )]
    WriteCache {
        /// The file or folder.
        path: PathBuf,
        /// Size of the file, as far as known.
        bytes_needed: u64,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file of an exported corpus cannot be written.
    #[error("cannot write `{}`: {source}", path.display())]
    WriteCorpus {
        /// The file.
        path: PathBuf,
        /// The system's message.
        #[source]
        source: std::io::Error,
    },
    /// No input holds any text or tokens.
    #[error("no text in {inputs}: {skipped}\nhint: give a file or folder of UTF-8 text")]
    Empty {
        /// The inputs, as readable text.
        inputs: String,
        /// Skipped files with their reasons, as text.
        skipped: String,
    },
    /// A file given by name is not text, and has none of the supported formats.
    #[error("`{}` is {what}\nhint: {hint}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Description of the file's format.
        what: String,
        /// Remedy.
        hint: String,
    },
    /// A record has none of the fields that can be its text.
    #[error(
        "`{}`, {place}: expected {expected}, got {found}\nhint: `--text-field NAME` names the \
         field; a copy that ends in `.txt` is trained on as it is", path.display()
    )]
    RecordField {
        /// The file.
        path: PathBuf,
        /// Position in the file.
        place: String,
        /// Expected fields of a record.
        expected: String,
        /// The record's fields, as text.
        found: String,
    },
    /// A file of records is damaged.
    #[error("`{}`, {place}: {message}", path.display())]
    RecordSyntax {
        /// The file.
        path: PathBuf,
        /// Position in the file.
        place: String,
        /// Message of the parser.
        message: String,
    },
    /// Conversations need a chat template.
    #[error(
        "records with messages need a chat template, and `{}` has no chat template\nhint: expected \
         `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`, beside the \
         tokenizer; `--text-field NAME` takes a field of text instead", folder.display()
    )]
    NoChatTemplate {
        /// The folder of the tokenizer.
        folder: PathBuf,
    },
    /// Conversations need a tokenizer with a chat template.
    #[error(
        "records with messages need a tokenizer with a chat template, got byte-level tokens\nhint: \
         `--tokenizer FOLDER/tokenizer.json`, or `--text-field NAME` for a field of text"
    )]
    ChatOfBytes,
    /// A chat template cannot be understood.
    #[error("chat template of `{}`: {message}", path.display())]
    ChatTemplate {
        /// The file with the template.
        path: PathBuf,
        /// Message of the parser.
        message: String,
    },
    /// A conversation cannot be rendered, or its answers cannot be found.
    #[error("`{}`, {place}: the chat template: {message}", path.display())]
    Chat {
        /// The file of the record.
        path: PathBuf,
        /// Position in the file.
        place: String,
        /// Description of the failure.
        message: String,
    },
    /// An evaluation has tokens, but no targets.
    #[error(
        "the {split} part has {tokens} tokens, and nothing to predict in the {windows} windows of \
         {seq} tokens that an evaluation reads: {why}\nhint: give other data to evaluate on with \
         `--eval-data`, or a larger `eval_tokens`"
    )]
    NothingToPredict {
        /// The part.
        split: Split,
        /// Number of tokens of the part.
        tokens: u64,
        /// Windows of an evaluation.
        windows: u64,
        /// Tokens of a window.
        seq: usize,
        /// Why no target counts.
        why: &'static str,
    },
    /// One part of the data is too short for a window or a batch of windows.
    #[error(
        "the {split} part has {found} tokens; {what} needs {needed}\nhint: give more data, or a \
         smaller `{smaller}`"
    )]
    TooShort {
        /// The part.
        split: Split,
        /// Number of tokens of the part.
        found: u64,
        /// Purpose of the tokens.
        what: String,
        /// Number of tokens needed.
        needed: u64,
        /// Setting that reduces the need.
        smaller: &'static str,
    },
    /// Too few tokens for a training part and a held-out part of two tokens each.
    #[error(
        "the data has {found} tokens in all; a training part and a held-out part need at least \
         {needed}\nhint: give more data"
    )]
    CannotSplit {
        /// Number of tokens in all.
        found: u64,
        /// Number of tokens that a split needs.
        needed: u64,
    },
    /// A token is outside the vocabulary of the model.
    #[error(
        "token {token} at position {position} of the {split} part is outside the model's \
         vocabulary of {vocab}\nhint: the model needs a `vocab_size` of at least {vocab_needed}, \
         or the data another tokenizer"
    )]
    TokenOutsideVocab {
        /// The token.
        token: u32,
        /// Index of the token in the part.
        position: u64,
        /// The part.
        split: Split,
        /// The number of tokens the model knows.
        vocab: u64,
        /// The smallest vocabulary that covers every token of the data.
        vocab_needed: u64,
    },
    /// A batch shape has a zero, or its size overflows.
    #[error("a batch needs at least one row and one token a row, got {batch} x {seq}")]
    BatchShape {
        /// Rows.
        batch: usize,
        /// Tokens a row.
        seq: usize,
    },
    /// A token file does not start with a known magic number.
    #[error(
        "token file `{}`: expected magic number 20240520 (u16 tokens) or 20240801 (u32 tokens), \
         got {magic}\nhint: {hint}", path.display()
    )]
    BinMagic {
        /// The file.
        path: PathBuf,
        /// The first number of the file.
        magic: i32,
        /// Possible format of the file, with a remedy.
        hint: &'static str,
    },
    /// A token file has an unknown version.
    #[error(
        "token file `{}`: expected version {} with magic number {magic}, got {version}",
        path.display(), super::bin::versions(*magic)
    )]
    BinVersion {
        /// The first number of the file.
        magic: i32,
        /// The file.
        path: PathBuf,
        /// The second number of the file.
        version: i32,
    },
    /// The length of a token file contradicts its header.
    #[error(
        "token file `{}`: the header says {tokens} tokens of {width} bytes, so {expected} bytes in \
         all, but the file has {found}\nhint: the file is cut short or damaged; write it again",
        path.display()
    )]
    BinLength {
        /// The file.
        path: PathBuf,
        /// Tokens according to the header.
        tokens: u64,
        /// Bytes a token.
        width: u64,
        /// Expected length in bytes.
        expected: u64,
        /// Actual length in bytes.
        found: u64,
    },
    /// A token file is shorter than its header.
    #[error(
        "token file `{}`: expected a header of 1024 bytes, got a file of {found} bytes",
        path.display()
    )]
    BinHeader {
        /// The file.
        path: PathBuf,
        /// Length of the file in bytes.
        found: u64,
    },
    /// A token does not fit an i32, the token type of models.
    #[error("token file `{}`: expected tokens below 2147483648, got {token}", path.display())]
    BinToken {
        /// The file.
        path: PathBuf,
        /// The token.
        token: u32,
    },
    /// Text and token files were given together.
    #[error(
        "`{}` holds tokens and `{}` holds text; give either text or token files",
        tokens.display(), text.display()
    )]
    MixedInputs {
        /// One of the token files.
        tokens: PathBuf,
        /// One of the text files.
        text: PathBuf,
    },
    /// A file changed between its two reads.
    #[error(
        "`{}` changed while it was read\nhint: start again when nobody writes to it",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The tokenizer file could not be understood.
    #[error(
        "tokenizer `{}`: {message}\nhint: expected the `tokenizer.json` of a Hugging Face fast \
         tokenizer", path.display()
    )]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Message of the parser.
        message: String,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed on `{name}`: {message}")]
    Encode {
        /// The document.
        name: String,
        /// Message of the tokenizer.
        message: String,
    },
    /// A byte-level tokenizer cannot have this vocabulary size.
    #[error(
        "vocab_size: expected {least} (256 bytes and `{END_OF_TEXT}`) to {most}, got {found}\n\
         hint: `--vocab-size 32000`",
        least = super::bpe::VOCAB_SIZE_MIN,
        most = super::bpe::VOCAB_SIZE_MAX
    )]
    VocabSize {
        /// The requested size.
        found: u32,
    },
    /// The output of a tokenizer exists already.
    #[error(
        "`{}` exists already\nhint: `--force` writes over it, `--out` names another file",
        path.display()
    )]
    OutputExists {
        /// The file.
        path: PathBuf,
    },
    /// The output of a tokenizer is a folder.
    #[error(
        "`{}` is a folder, expected the name of a file\nhint: `--out {}`",
        path.display(), path.join("tokenizer.json").display()
    )]
    OutputIsFolder {
        /// The folder.
        path: PathBuf,
    },
    /// The tokenizer cannot be written.
    #[error("cannot write the tokenizer `{}`: {source}", path.display())]
    WriteTokenizer {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The output folder's configuration names another end-of-text token.
    #[error(
        "the `tokenizer_config.json` beside `{}` names `{found}` as eos, expected \
         `{END_OF_TEXT}`\nhint: `--out` in a folder of its own", path.display()
    )]
    OtherEndOfText {
        /// The tokenizer.
        path: PathBuf,
        /// The name in the file.
        found: String,
    },
    /// A token file was given where text is needed.
    #[error(
        "`{}` holds tokens; a tokenizer learns from text\nhint: give the text that the tokens were \
         made of", path.display()
    )]
    TokensNotText {
        /// The token file.
        path: PathBuf,
    },
    /// The text is larger than the counts of the merge algorithm.
    #[error(
        "two bytes stand side by side {found} times in the text; expected at most {most}\nhint: \
         `--max-bytes 4GB` learns from a part of it",
        most = i32::MAX
    )]
    TooMuchText {
        /// Number of occurrences of the most frequent pair of bytes.
        found: u64,
    },
    /// Learning the merges failed.
    #[error("the tokenizer cannot be made: {message}")]
    Merges {
        /// Description of the failure.
        message: String,
    },
    /// Decoding with a new tokenizer does not reproduce a text.
    #[error("the new tokenizer does not give the text of `{name}` back from its tokens")]
    RoundTrip {
        /// The document.
        name: String,
    },
    /// The default corpus is not available.
    #[error(
        "the default corpus (Rust sources of the locked dependencies of `{}`) is not available: \
         {message}\nhint: {hint}", workspace.display()
    )]
    DefaultCorpus {
        /// The workspace.
        workspace: PathBuf,
        /// Description of the failure.
        message: String,
        /// Remedy.
        hint: String,
    },
    /// The reading thread ended early.
    #[error("the thread that prepares batches stopped at batch {batch_index}")]
    LoaderStopped {
        /// The requested batch.
        batch_index: u64,
    },
}

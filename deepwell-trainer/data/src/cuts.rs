//! Positions at which a text can be cut without changing its tokens.
//!
//! A tokenizer finds added tokens, normalizes the text between them, splits the result into words
//! and applies its model to each word. A cut keeps the tokens if no added token, normalization or
//! word crosses the cut, and if neither part gains a prefix. This is proven here for a cut between
//! a letter and a space followed by another letter, and for the listed normalizers and
//! pre-tokenizers. With every other tokenizer, documents are not cut.
//!
//! Normalizers: the Unicode forms have a boundary before a space, the other listed normalizers map
//! characters one by one. Pre-tokenizers: the listed patterns match no letter followed by a space,
//! look ahead only from white space, and never look back. Models: a word is independent of the
//! words around it. A BPE model without words (Llama 2, Gemma) also has a boundary before a space,
//! if spaces in its vocabulary occur only at the start of tokens.

use serde_json::Value;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer, Tokenizer};

/// Possible cuts of a tokenizer's texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cuts {
    /// After each byte.
    Anywhere,
    /// After a newline, otherwise before a character: for counting words, where a cut hardly
    /// matters.
    Lines,
    /// Before a space between two letters.
    Words(WordCuts),
    /// Nowhere.
    Nowhere,
}

/// Cuts before a space between two letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WordCuts {
    /// The tokenizer puts a space before each text: the second part begins after the space of the
    /// cut.
    drops_space: bool,
    /// Only ASCII letters, because the normalizer has a character table.
    ascii: bool,
    /// A Chinese or Japanese comma or full stop works like a space.
    ideographic: bool,
}

/// A cut: the first part ends at `end`, the second begins at `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) end: usize,
    pub(crate) start: usize,
}

impl Cuts {
    /// Returns the last cut of `text` at `from` or later. `text` may end within a character.
    pub(crate) fn last(self, text: &[u8], from: usize) -> Option<Cut> {
        match self {
            Cuts::Anywhere => Some(Cut { end: text.len(), start: text.len() }),
            Cuts::Lines => {
                let end = after_newline(text);
                Some(Cut { end, start: end })
            }
            Cuts::Nowhere => None,
            Cuts::Words(words) => {
                (from.max(1)..text.len()).rev().find_map(|at| words.cut_at(text, at))
            }
        }
    }

    /// Returns the possible cuts of `tokenizer`'s texts.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Cuts {
        let words = Rules::of(tokenizer).and_then(|rules| rules.cuts(tokenizer));
        words.map_or(Cuts::Nowhere, Cuts::Words)
    }
}

impl WordCuts {
    fn cut_at(self, text: &[u8], at: usize) -> Option<Cut> {
        let is_letter = |letter: char| {
            if self.ascii { letter.is_ascii_alphabetic() } else { is_letter(letter) }
        };
        let is_stop = |rest: &[u8]| IDEOGRAPHIC_STOPS.iter().any(|stop| rest.starts_with(stop));
        if text[at] == b' ' {
            let after = first_char(&text[at + 1..])?;
            let is_cut = is_letter(after) && last_char(&text[..at]).is_some_and(is_letter);
            return is_cut.then_some(Cut { end: at, start: at + usize::from(self.drops_space) });
        }
        let is_cut = self.ideographic
            && is_stop(&text[at..])
            && last_char(&text[..at]).is_some_and(is_letter);
        is_cut.then_some(Cut { end: at, start: at })
    }
}

/// `、`, `。` and `，`, in UTF-8.
const IDEOGRAPHIC_STOPS: [&[u8]; 3] = [b"\xe3\x80\x81", b"\xe3\x80\x82", b"\xef\xbc\x8c"];

/// Letters (`\p{L}`) in every version of Unicode that a regular-expression library may use: of
/// ASCII, Greek, Cyrillic, Hebrew, Arabic, Hiragana, Katakana, Han and Hangul. None of these
/// letters composes with a following space or stop.
fn is_letter(letter: char) -> bool {
    matches!(letter,
        'a'..='z' | 'A'..='Z' | 'α'..='ω' | 'Α'..='Ρ' | 'А'..='я' | '\u{5d0}'..='\u{5ea}'
        | '\u{628}'..='\u{63a}' | '\u{641}'..='\u{64a}' | '\u{3041}'..='\u{3094}'
        | '\u{30a1}'..='\u{30fa}' | '\u{4e00}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7a3}')
}

fn first_char(text: &[u8]) -> Option<char> {
    (1..=text.len().min(4)).find_map(|length| str::from_utf8(&text[..length]).ok()?.chars().next())
}

fn last_char(text: &[u8]) -> Option<char> {
    let start = text.iter().rposition(|byte| byte & 0xc0 != 0x80)?;
    str::from_utf8(&text[start..]).ok()?.chars().next()
}

/// Position after the last newline of a full piece, otherwise before its last character.
fn after_newline(data: &[u8]) -> usize {
    if let Some(newline) = data.iter().rposition(|&byte| byte == b'\n') {
        return newline + 1;
    }
    let is_start = |byte: &u8| byte & 0xc0 != 0x80;
    match data.iter().rposition(is_start) {
        Some(start) if start > 0 && data.len() - start <= 4 => start,
        _ => data.len(),
    }
}

/// Patterns of words: GPT-2, its faster form, GPT-4 and Llama 3, Qwen 2, GPT-4o, DeepSeek V3, and
/// `Whitespace`. No pattern matches a letter followed by a space or an ideographic stop.
const WORD_PATTERNS: [&str; 7] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    concat!(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*",
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    r"\w+|[^\w\s]+",
];

/// Patterns that match no space, and letters only in a run of a script.
const LOCAL_PATTERNS: [&str; 6] =
    [r"\p{N}{1,3}", r"\p{N}", r"\d", r"[0-9]", r"[一-龥぀-ゟ゠-ヿ]+", r"[一-龥\u3040-ゟ゠-ヿ]+"];

/// Combined effect of a tokenizer's steps, all of which are listed.
#[derive(Debug)]
struct Rules {
    /// The character that represents a space after the steps so far.
    space: char,
    /// The character that represents a space after the normalizer.
    space_normalized: char,
    /// A space is put before the text, and before the text after each added token, whatever its
    /// first character.
    prepends: bool,
    /// A step may put a space before a text that begins with another character.
    prefixes: bool,
    /// A word ends before each space that follows a letter.
    splits: bool,
    /// A word ends before each ideographic stop that follows a letter.
    splits_stops: bool,
    /// The normalizer has a character table.
    has_table: bool,
}

impl Rules {
    /// `None` if any step is not listed.
    fn of(tokenizer: &Tokenizer) -> Option<Rules> {
        let mut rules = Rules {
            space: ' ',
            space_normalized: ' ',
            prepends: false,
            prefixes: false,
            splits: false,
            splits_stops: false,
            has_table: false,
        };
        if let Some(normalizer) = tokenizer.get_normalizer() {
            rules.normalizer(&serde_json::to_value(normalizer).ok()?)?;
        }
        // The prefix of a text has to be the character that represents a space.
        if rules.prepends && rules.space != METASPACE {
            return None;
        }
        rules.space_normalized = rules.space;
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            rules.pre_tokenizer(&serde_json::to_value(pre_tokenizer).ok()?)?;
        }
        Some(rules)
    }

    fn normalizer(&mut self, step: &Value) -> Option<()> {
        match step["type"].as_str()? {
            "Sequence" => {
                let mut steps = step["normalizers"].as_array()?.iter();
                steps.all(|step| self.normalizer(step).is_some()).then_some(())
            }
            "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents" | "Nmt"
            | "BertNormalizer" => Some(()),
            "Precompiled" => {
                self.has_table = true;
                Some(())
            }
            "Prepend" => {
                let is_first = !self.prepends;
                (self.prepends, self.prefixes) = (true, true);
                (is_first && is_metaspace(step["prepend"].as_str()?)).then_some(())
            }
            "Replace" => match pattern(step)? {
                Pattern::Text(" ") if is_metaspace(step["content"].as_str()?) => {
                    self.space = METASPACE;
                    Some(())
                }
                // The space of a cut is a single space.
                Pattern::Regex(" {2,}") => (self.space == ' ').then_some(()),
                _ => None,
            },
            _ => None,
        }
    }

    fn pre_tokenizer(&mut self, step: &Value) -> Option<()> {
        let has_spaces = self.space == ' ';
        match step["type"].as_str()? {
            "Sequence" => {
                let mut steps = step["pretokenizers"].as_array()?.iter();
                steps.all(|step| self.pre_tokenizer(step).is_some()).then_some(())
            }
            "WhitespaceSplit" => {
                self.splits |= has_spaces;
                Some(())
            }
            "BertPreTokenizer" | "Whitespace" => {
                self.splits |= has_spaces;
                self.splits_stops |= has_spaces;
                Some(())
            }
            "ByteLevel" => {
                self.prefixes |= step["add_prefix_space"].as_bool()?;
                let finds_words = has_spaces && step["use_regex"].as_bool()?;
                self.splits |= finds_words;
                self.splits_stops |= finds_words;
                let is_known = self.splits || has_spaces;
                self.space = BYTE_LEVEL_SPACE;
                is_known.then_some(())
            }
            "Metaspace" => {
                self.prefixes |= step["prepend_scheme"].as_str()? != "never";
                self.splits |= step["split"].as_bool()?;
                if has_spaces {
                    self.space = METASPACE;
                }
                is_metaspace(step["replacement"].as_str()?).then_some(())
            }
            "Digits" | "Punctuation" => Some(()),
            "Split" => self.split(step),
            _ => None,
        }
    }

    fn split(&mut self, step: &Value) -> Option<()> {
        let has_spaces = self.space == ' ';
        let behavior = step["behavior"].as_str()?;
        let inverts = step["invert"].as_bool()?;
        let is_known = match pattern(step)? {
            Pattern::Text(" ") if has_spaces => {
                self.splits = true;
                !inverts
                    && ["Removed", "Isolated", "MergedWithNext", "Contiguous"].contains(&behavior)
            }
            // No space is left to cut at.
            Pattern::Text(" ") => !inverts,
            Pattern::Text(text) => {
                let is_apart = |c: char| !c.is_alphanumeric() && !is_beside(c);
                !inverts && !text.is_empty() && text.chars().all(is_apart)
            }
            Pattern::Regex(r"\s+") => {
                self.splits |= has_spaces;
                !inverts && ["Removed", "Isolated"].contains(&behavior)
            }
            Pattern::Regex(regex) if WORD_PATTERNS.contains(&regex) => {
                self.splits |= has_spaces;
                self.splits_stops |= has_spaces;
                matches!((behavior, inverts), ("Isolated", false) | ("Removed", true))
            }
            Pattern::Regex(regex) => {
                LOCAL_PATTERNS.contains(&regex) && behavior == "Isolated" && !inverts
            }
        };
        is_known.then_some(())
    }

    /// The cuts, where added tokens, a table of the normalizer and the model allow any.
    fn cuts(&self, tokenizer: &Tokenizer) -> Option<WordCuts> {
        let is_cut = self.added_tokens_allow(tokenizer)
            && (!self.has_table || self.table_allows(tokenizer))
            && self.model_allows(tokenizer);
        let ideographic = self.splits_stops && !self.prefixes && !self.has_table;
        is_cut.then_some(WordCuts {
            drops_space: self.prepends,
            ascii: self.has_table,
            ideographic,
        })
    }

    /// Checks that no added token crosses a cut, or looks across a cut.
    fn added_tokens_allow(&self, tokenizer: &Tokenizer) -> bool {
        let normalizes = tokenizer.get_normalizer().is_some();
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        added.values().all(|token| {
            let content = token.content.as_str();
            let touches = |c: char| c.is_alphanumeric() || is_beside(c);
            let begins_beside = content.chars().next().is_some_and(touches);
            let ends_beside = content.chars().next_back().is_some_and(touches);
            let mut pairs = content.chars().zip(content.chars().skip(1));
            let crosses = pairs.any(|(c, next)| c.is_alphabetic() && is_beside(next));
            let looks_around = token.lstrip || token.rstrip || token.single_word;
            // The normalizer changes the characters of such a token, and may put characters before
            // it.
            let is_normalized = token.normalized && normalizes;
            !crosses
                && !(looks_around && (begins_beside || ends_beside || is_normalized))
                && !((self.prepends || is_normalized) && begins_beside)
        })
    }

    /// Checks that a normalizer's table keeps ASCII letters letters, and the space between them a
    /// space.
    fn table_allows(&self, tokenizer: &Tokenizer) -> bool {
        let Some(normalizer) = tokenizer.get_normalizer() else { return true };
        ('a'..='z').chain('A'..='Z').all(|letter| {
            let mut text = NormalizedString::from(format!("{letter} {letter}"));
            let is_done = normalizer.normalize(&mut text).is_ok();
            let end: Vec<char> = text.get().chars().rev().take(3).collect();
            is_done
                && matches!(end[..], [a, space, b] if space == self.space_normalized
                    && a.is_ascii_alphabetic() && b.is_ascii_alphabetic())
        })
    }

    /// Checks that words are tokenized independently; without words, that a BPE model merges
    /// nothing with a following space.
    fn model_allows(&self, tokenizer: &Tokenizer) -> bool {
        let bpe = match tokenizer.get_model() {
            ModelWrapper::BPE(bpe) => bpe,
            _ => return self.splits,
        };
        if bpe.dropout.is_some_and(|dropout| dropout != 0.0) {
            return false;
        }
        if self.splits {
            return true;
        }
        let marks = [&bpe.continuing_subword_prefix, &bpe.end_of_word_suffix];
        if marks.into_iter().flatten().any(|mark| !mark.is_empty()) || bpe.ignore_merges {
            return false;
        }
        let vocab = tokenizer.get_vocab(false);
        let is_apart = |token: &String| !token.trim_start_matches(self.space).contains(self.space);
        vocab.contains_key(&self.space.to_string()) && vocab.keys().all(is_apart)
    }
}

/// Whether `c` is a form of space or an ideographic stop.
fn is_beside(c: char) -> bool {
    c.is_whitespace() || matches!(c, METASPACE | BYTE_LEVEL_SPACE | '、' | '。' | '，')
}

/// Representation of a space in SentencePiece vocabularies.
const METASPACE: char = '\u{2581}';

/// Representation of a space in byte-level vocabularies.
const BYTE_LEVEL_SPACE: char = '\u{120}';

fn is_metaspace(text: &str) -> bool {
    text.chars().eq([METASPACE])
}

enum Pattern<'a> {
    Text(&'a str),
    Regex(&'a str),
}

fn pattern(step: &Value) -> Option<Pattern<'_>> {
    let pattern = &step["pattern"];
    let text = pattern["String"].as_str().map(Pattern::Text);
    text.or_else(|| pattern["Regex"].as_str().map(Pattern::Regex))
}

#[cfg(test)]
mod tests;

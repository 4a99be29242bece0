//! Tokens. Words keep their dots and double colons: `ld.global.v4.u32` and `%tid.x` are one token.

use super::ParseError;

/// A token; text borrows from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Token<'a> {
    /// `mov.u32`, `%r1`, `$L__BB0_1`, `_`.
    Word(&'a str),
    /// `.reg`, without the dot and without further dots.
    Directive(&'a str),
    /// A word that begins with a digit, as written.
    Number(&'a str),
    /// The text between quotes, as written.
    Text(&'a str),
    /// Anything else.
    Mark(u8),
    /// End of the file.
    End,
}

/// Splits text into tokens, with one token of lookahead.
pub(super) struct Lexer<'a> {
    text: &'a str,
    position: usize,
    line: u32,
    line_start: usize,
    token: Token<'a>,
    token_line: u32,
    token_column: u32,
    /// Number of open parentheses, braces and signs.
    depth: u32,
}

/// Most nested parentheses, braces and signs around a number or operand. The parser recurses at
/// each of them, and a thread's stack is small.
const DEPTH_MAX: u32 = 64;

fn starts_word(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || matches!(byte, b'_' | b'$' | b'%')
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%')
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Result<Lexer<'a>, ParseError> {
        let mut lexer = Lexer {
            text,
            position: 0,
            line: 1,
            line_start: 0,
            token: Token::End,
            token_line: 1,
            token_column: 1,
            depth: 0,
        };
        lexer.advance()?;
        Ok(lexer)
    }

    /// Enters a nesting level; [`Lexer::leave`] ends the level.
    pub(super) fn enter(&mut self) -> Result<(), ParseError> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            let what = format!("expected at most {DEPTH_MAX} parentheses, braces and signs");
            return Err(self.error(format!("{what} around each other")));
        }
        Ok(())
    }

    /// Leaves a nesting level.
    pub(super) fn leave(&mut self) {
        self.depth -= 1;
    }

    /// Returns the next token without consuming it.
    pub(super) fn peek(&self) -> Token<'a> {
        self.token
    }

    /// Returns the line of the next token.
    pub(super) fn next_line(&self) -> u32 {
        self.token_line
    }

    /// Consumes and returns the next token.
    pub(super) fn take(&mut self) -> Result<Token<'a>, ParseError> {
        let token = self.token;
        self.advance()?;
        Ok(token)
    }

    /// Consumes the next token if it is this mark.
    pub(super) fn take_mark(&mut self, mark: u8) -> Result<bool, ParseError> {
        let found = self.token == Token::Mark(mark);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    /// Consumes the next token if it is this directive.
    pub(super) fn take_directive(&mut self, name: &str) -> Result<bool, ParseError> {
        let found = self.token == Token::Directive(name);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    /// Builds an "expected …, got …" error at the next token.
    pub(super) fn expected(&self, what: &str) -> ParseError {
        let came = match self.token {
            Token::Word(text) | Token::Number(text) => format!("`{text}`"),
            Token::Directive(text) => format!("`.{text}`"),
            Token::Text(text) => format!("\"{text}\""),
            Token::Mark(mark) => format!("`{}`", mark as char),
            Token::End => "the end of the text".to_string(),
        };
        self.error(format!("expected {what}, got {came}"))
    }

    /// Builds an error at the next token.
    pub(super) fn error(&self, message: String) -> ParseError {
        ParseError { line: self.token_line, column: self.token_column, message }
    }

    pub(super) fn expect_mark(&mut self, mark: u8) -> Result<(), ParseError> {
        if self.take_mark(mark)? {
            Ok(())
        } else {
            Err(self.expected(&format!("`{}`", mark as char)))
        }
    }

    pub(super) fn expect_word(&mut self, what: &str) -> Result<&'a str, ParseError> {
        match self.token {
            Token::Word(word) => {
                self.advance()?;
                Ok(word)
            }
            _ => Err(self.expected(what)),
        }
    }

    /// Consumes a number token and returns its text, for `.version`, whose value is not a number.
    pub(super) fn take_number_text(&mut self, what: &str) -> Result<&'a str, ParseError> {
        match self.token {
            Token::Number(text) => {
                self.advance()?;
                Ok(text)
            }
            _ => Err(self.expected(what)),
        }
    }

    fn advance(&mut self) -> Result<(), ParseError> {
        self.skip_blanks()?;
        let bytes = self.text.as_bytes();
        let start = self.position;
        self.token_line = self.line;
        self.token_column = (start - self.line_start) as u32 + 1;
        let Some(&first) = bytes.get(start) else {
            self.token = Token::End;
            return Ok(());
        };
        if starts_word(first) {
            self.position = self.word_end(start, true);
            self.token = Token::Word(&self.text[start..self.position]);
        } else if first.is_ascii_digit() {
            self.position = self.number_end(start);
            self.token = Token::Number(&self.text[start..self.position]);
        } else if first == b'.' && bytes.get(start + 1).is_some_and(|&next| in_word(next)) {
            self.position = self.word_end(start + 1, false);
            self.token = Token::Directive(&self.text[start + 1..self.position]);
        } else if first == b'"' {
            let rest = &bytes[start + 1..];
            let length = rest.iter().position(|&byte| byte == b'"' || byte == b'\n');
            match length {
                Some(length) if rest[length] == b'"' => {
                    self.position = start + length + 2;
                    self.token = Token::Text(&self.text[start + 1..start + 1 + length]);
                }
                _ => return Err(self.error("expected `\"` at the end of a string".to_string())),
            }
        } else {
            if !first.is_ascii() {
                return Err(self.error("expected ASCII text outside of strings".to_string()));
            }
            self.position = start + 1;
            self.token = Token::Mark(first);
        }
        Ok(())
    }

    fn word_end(&self, start: usize, dots: bool) -> usize {
        let bytes = self.text.as_bytes();
        let mut end = start;
        loop {
            while bytes.get(end).is_some_and(|&byte| in_word(byte)) {
                end += 1;
            }
            let next = |offset: usize| bytes.get(end + offset).copied().unwrap_or(0);
            if dots && next(0) == b'.' && in_word(next(1)) {
                end += 1;
            } else if next(0) == b':' && next(1) == b':' && in_word(next(2)) {
                end += 2;
            } else {
                return end;
            }
        }
    }

    fn number_end(&self, start: usize) -> usize {
        let bytes = self.text.as_bytes();
        let mut end = start;
        let is_hexadecimal = matches!(bytes.get(start + 1), Some(b'x' | b'X'));
        while let Some(&byte) = bytes.get(end) {
            let fraction = byte == b'.' && bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
            let exponent_sign = matches!(byte, b'+' | b'-')
                && !is_hexadecimal
                && bytes[start..end].contains(&b'.')
                && matches!(bytes[end - 1], b'e' | b'E');
            if !(byte.is_ascii_alphanumeric() || fraction || exponent_sign) {
                break;
            }
            end += 1;
        }
        end
    }

    fn skip_blanks(&mut self) -> Result<(), ParseError> {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.position) {
            match byte {
                b'\n' => {
                    self.position += 1;
                    self.line += 1;
                    self.line_start = self.position;
                }
                b' ' | b'\t' | b'\r' => self.position += 1,
                // The CUDA library appends a zero byte to PTX that it passes on.
                0 => self.position += 1,
                b'/' if bytes.get(self.position + 1) == Some(&b'/') => self.skip_line(),
                b'#' if self.text[self.line_start..self.position].trim().is_empty() => {
                    self.skip_line();
                }
                b'/' if bytes.get(self.position + 1) == Some(&b'*') => self.skip_comment()?,
                _ => break,
            }
        }
        Ok(())
    }

    fn skip_line(&mut self) {
        let rest = &self.text.as_bytes()[self.position..];
        self.position += rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
    }

    fn skip_comment(&mut self) -> Result<(), ParseError> {
        let start = self.position;
        let Some(length) = self.text[start + 2..].find("*/") else {
            self.token_line = self.line;
            self.token_column = (start - self.line_start) as u32 + 1;
            return Err(self.error("expected `*/` at the end of a comment".to_string()));
        };
        let end = start + 2 + length + 2;
        for (offset, byte) in self.text.as_bytes()[start..end].iter().enumerate() {
            if *byte == b'\n' {
                self.line += 1;
                self.line_start = start + offset + 1;
            }
        }
        self.position = end;
        Ok(())
    }
}

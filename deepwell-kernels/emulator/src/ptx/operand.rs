//! Operands of instructions.

use super::ParseError;
use super::ast::{Name, Operand};
use super::lexer::Token;
use super::literal::{self, Literal};
use super::parser::Parser;

impl Parser<'_> {
    /// Parses operands up to and including the semicolon.
    pub(super) fn operands(&mut self, is_call: bool) -> Result<Vec<Operand>, ParseError> {
        let mut operands = Vec::with_capacity(4);
        if self.lexer.take_mark(b';')? {
            return Ok(operands);
        }
        loop {
            operands.push(if is_call && self.lexer.peek() == Token::Mark(b'(') {
                self.lexer.take()?;
                Operand::Group(self.operand_list(b')')?)
            } else {
                self.operand()?
            });
            if self.lexer.take_mark(b';')? {
                return Ok(operands);
            }
            self.lexer.expect_mark(b',')?;
        }
    }

    fn operand_list(&mut self, end: u8) -> Result<Vec<Operand>, ParseError> {
        let mut operands = Vec::new();
        if self.lexer.take_mark(end)? {
            return Ok(operands);
        }
        loop {
            operands.push(self.operand()?);
            if self.lexer.take_mark(end)? {
                return Ok(operands);
            }
            self.lexer.expect_mark(b',')?;
        }
    }

    fn operand(&mut self) -> Result<Operand, ParseError> {
        let first = self.simple_operand()?;
        if matches!(first, Operand::Name(_) | Operand::Sink) && self.lexer.take_mark(b'|')? {
            let second = self.simple_operand()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn simple_operand(&mut self) -> Result<Operand, ParseError> {
        self.lexer.enter()?;
        let operand = self.bare_operand()?;
        self.lexer.leave();
        Ok(operand)
    }

    fn bare_operand(&mut self) -> Result<Operand, ParseError> {
        match self.lexer.peek() {
            token if literal::starts_expression(token) => {
                Ok(match literal::expression(&mut self.lexer)? {
                    Literal::Integer(value) => Operand::Integer(value),
                    Literal::Single(bits) => Operand::Single(bits),
                    Literal::Double(bits) => Operand::Double(bits),
                })
            }
            Token::Word("_") => {
                self.lexer.take()?;
                Ok(Operand::Sink)
            }
            Token::Word(word) => {
                self.lexer.take()?;
                let name = self.name(word);
                match self.signed_offset()? {
                    Some(offset) => Ok(Operand::Offset(name, offset)),
                    None => Ok(Operand::Name(name)),
                }
            }
            Token::Mark(b'!') => {
                self.lexer.take()?;
                Ok(Operand::Negated(Box::new(self.simple_operand()?)))
            }
            Token::Mark(b'{') => {
                self.lexer.take()?;
                Ok(Operand::Vector(self.operand_list(b'}')?))
            }
            Token::Mark(b'[') => {
                self.lexer.take()?;
                self.address()
            }
            _ => Err(self.lexer.expected("an operand")),
        }
    }

    /// Parses an address after its opening bracket.
    fn address(&mut self) -> Result<Operand, ParseError> {
        let (base, offset): (Option<Name>, i64) = match self.lexer.peek() {
            token if literal::starts_expression(token) => {
                (None, literal::integer_expression(&mut self.lexer)? as i64)
            }
            Token::Word(word) => {
                self.lexer.take()?;
                (Some(self.name(word)), self.signed_offset()?.unwrap_or(0))
            }
            _ => return Err(self.lexer.expected("a register, a variable or a number")),
        };
        if self.lexer.take_mark(b']')? {
            return Ok(Operand::Address { base, offset });
        }
        self.lexer.expect_mark(b',')?;
        // A single coordinate may omit the braces.
        let coordinates = if self.lexer.take_mark(b'{')? {
            self.operand_list(b'}')?
        } else {
            vec![self.operand()?]
        };
        self.lexer.expect_mark(b']')?;
        Ok(Operand::TensorAddress { base, offset, coordinates })
    }

    /// Parses `+ 4`, `- 4` or `+ -4` after a name.
    pub(super) fn signed_offset(&mut self) -> Result<Option<i64>, ParseError> {
        match self.lexer.peek() {
            Token::Mark(b'+') => {
                self.lexer.take()?;
                Ok(Some(literal::integer_expression(&mut self.lexer)? as i64))
            }
            Token::Mark(b'-') => Ok(Some(literal::integer_expression(&mut self.lexer)? as i64)),
            _ => Ok(None),
        }
    }
}

//! Numbers, and constant expressions over numbers.

use super::ParseError;
use super::lexer::{Lexer, Token};

/// A number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Literal {
    /// An integer in two's complement.
    Integer(u64),
    /// Bits of a `0f` literal.
    Single(u32),
    /// Bits of a `0d` literal or of a decimal float.
    Double(u64),
}

/// Parses one number token.
pub(super) fn number(text: &str) -> Option<Literal> {
    let bytes = text.as_bytes();
    if bytes[0] == b'0' && bytes.len() > 1 {
        let digits = &text[2..];
        match bytes[1] {
            b'f' | b'F' if digits.len() == 8 => {
                return u32::from_str_radix(digits, 16).ok().map(Literal::Single);
            }
            b'd' | b'D' if digits.len() == 16 => {
                return u64::from_str_radix(digits, 16).ok().map(Literal::Double);
            }
            b'x' | b'X' => return integer(digits, 16),
            b'b' | b'B' => return integer(digits, 2),
            _ => {}
        }
    }
    if text.contains('.') || (text.contains(['e', 'E']) && !text.starts_with("0x")) {
        return text.parse::<f64>().ok().map(|value| Literal::Double(value.to_bits()));
    }
    let octal = bytes[0] == b'0' && bytes.len() > 1 && bytes[1].is_ascii_digit();
    integer(text, if octal { 8 } else { 10 })
}

fn integer(digits: &str, radix: u32) -> Option<Literal> {
    let digits = digits.strip_suffix(['U', 'u']).unwrap_or(digits);
    u64::from_str_radix(digits, radix).ok().map(Literal::Integer)
}

/// Whether a constant expression may begin with the token.
pub(super) fn starts_expression(token: Token<'_>) -> bool {
    matches!(token, Token::Number(_) | Token::Mark(b'-' | b'+' | b'~' | b'('))
        || token == Token::Word("WARP_SZ")
}

/// Parses a constant expression: numbers, signs, parentheses and C operators on integers.
pub(super) fn expression(lexer: &mut Lexer<'_>) -> Result<Literal, ParseError> {
    binary(lexer, 0)
}

/// Parses a constant expression that must be an integer.
pub(super) fn integer_expression(lexer: &mut Lexer<'_>) -> Result<u64, ParseError> {
    match expression(lexer)? {
        Literal::Integer(value) => Ok(value),
        _ => Err(lexer.expected("an integer")),
    }
}

// Operators by precedence, loosest first.
const LEVELS: &[&[u8]] = &[b"|", b"^", b"&", b"<>", b"+-", b"*/%"];

fn binary(lexer: &mut Lexer<'_>, level: usize) -> Result<Literal, ParseError> {
    let Some(marks) = LEVELS.get(level) else {
        return unary(lexer);
    };
    let mut left = binary(lexer, level + 1)?;
    loop {
        let Token::Mark(mark) = lexer.peek() else { return Ok(left) };
        if !marks.contains(&mark) {
            return Ok(left);
        }
        lexer.take()?;
        if matches!(mark, b'<' | b'>') {
            lexer.expect_mark(mark)?;
        }
        let right = binary(lexer, level + 1)?;
        let (Literal::Integer(a), Literal::Integer(b)) = (left, right) else {
            return Err(lexer.expected("integers on both sides of an operator"));
        };
        let value = match mark {
            b'|' => a | b,
            b'^' => a ^ b,
            b'&' => a & b,
            b'<' => a.checked_shl(b as u32).unwrap_or(0),
            b'>' => a.checked_shr(b as u32).unwrap_or(0),
            b'+' => a.wrapping_add(b),
            b'-' => a.wrapping_sub(b),
            b'*' => a.wrapping_mul(b),
            _ if b == 0 => return Err(lexer.error("division by zero".to_string())),
            b'/' => (a as i64).wrapping_div(b as i64) as u64,
            _ => (a as i64).wrapping_rem(b as i64) as u64,
        };
        left = Literal::Integer(value);
    }
}

fn unary(lexer: &mut Lexer<'_>) -> Result<Literal, ParseError> {
    lexer.enter()?;
    let value = operand_of_unary(lexer)?;
    lexer.leave();
    Ok(value)
}

fn operand_of_unary(lexer: &mut Lexer<'_>) -> Result<Literal, ParseError> {
    let token = lexer.peek();
    match token {
        Token::Number(text) => {
            let value = number(text).ok_or_else(|| lexer.expected("a number"))?;
            lexer.take()?;
            Ok(value)
        }
        Token::Word("WARP_SZ") => {
            lexer.take()?;
            Ok(Literal::Integer(32))
        }
        Token::Mark(b'(') => {
            lexer.take()?;
            // A cast such as `(.s64)` has no effect on 64-bit values.
            if let Token::Directive(_) = lexer.peek() {
                lexer.take()?;
                lexer.expect_mark(b')')?;
                return unary(lexer);
            }
            let value = expression(lexer)?;
            lexer.expect_mark(b')')?;
            Ok(value)
        }
        Token::Mark(mark @ (b'-' | b'+' | b'~' | b'!')) => {
            lexer.take()?;
            let value = unary(lexer)?;
            Ok(match (mark, value) {
                (b'-', Literal::Integer(value)) => Literal::Integer(value.wrapping_neg()),
                (b'-', Literal::Single(bits)) => Literal::Single(bits ^ 1 << 31),
                (b'-', Literal::Double(bits)) => Literal::Double(bits ^ 1 << 63),
                (b'~', Literal::Integer(value)) => Literal::Integer(!value),
                (b'!', Literal::Integer(value)) => Literal::Integer(u64::from(value == 0)),
                (_, value) => value,
            })
        }
        _ => Err(lexer.expected("a number")),
    }
}

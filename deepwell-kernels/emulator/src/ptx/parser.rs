//! Modules: directives, variables and functions.

use std::collections::HashMap;
use std::sync::Arc;

use super::ParseError;
use super::ast::{Directive, Function, InitialValue, Module, Name, Opcode, Variable};
use super::lexer::{Lexer, Token};
use super::literal::{self, Literal};
use crate::decode::{Space, Type};

/// Parses a PTX file.
///
/// # Errors
/// The first syntax error, with its line.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    let mut parser = Parser {
        lexer: Lexer::new(text)?,
        module: Module { address_bits: 64, ..Module::default() },
        names: HashMap::new(),
        opcodes: HashMap::new(),
        file_numbers: HashMap::new(),
    };
    while parser.lexer.peek() != Token::End {
        parser.item()?;
    }
    Ok(parser.module)
}

/// Largest alignment of a variable: one page of GPU memory.
const ALIGNMENT_MAX: u64 = 2 << 20;

/// Returns the memory space that a directive names.
pub(super) fn variable_space(name: &str) -> Option<Space> {
    Some(match name {
        "global" => Space::Global,
        "shared" | "shared::cta" => Space::Shared,
        "local" => Space::Local,
        "const" => Space::Constant,
        "param" => Space::Parameter,
        _ => return None,
    })
}

/// Parser state for one file.
pub(super) struct Parser<'a> {
    pub(super) lexer: Lexer<'a>,
    module: Module,
    names: HashMap<Box<str>, Name>,
    opcodes: HashMap<Box<str>, Arc<Opcode>>,
    file_numbers: HashMap<u64, u32>,
}

impl Parser<'_> {
    /// Interns a name.
    pub(super) fn name(&mut self, word: &str) -> Name {
        if let Some(name) = self.names.get(word) {
            return name.clone();
        }
        let name: Name = word.into();
        self.names.insert(word.into(), name.clone());
        name
    }

    /// Interns an opcode.
    pub(super) fn opcode(&mut self, text: &str) -> Arc<Opcode> {
        if let Some(opcode) = self.opcodes.get(text) {
            return opcode.clone();
        }
        let words = text.split('.').map(Into::into).collect();
        let opcode = Arc::new(Opcode { text: text.into(), words });
        self.opcodes.insert(text.into(), opcode.clone());
        opcode
    }

    /// Returns the index in [`Module::files`] of a `.file` number. `.loc` may precede its `.file`.
    pub(super) fn file_index(&mut self, number: u64) -> u32 {
        let files = &mut self.module.files;
        *self.file_numbers.entry(number).or_insert_with(|| {
            files.push(String::new());
            files.len() as u32 - 1
        })
    }

    pub(super) fn skip_past_semicolon(&mut self) -> Result<(), ParseError> {
        loop {
            match self.lexer.take()? {
                Token::Mark(b';') => return Ok(()),
                Token::End => return Err(self.lexer.expected("`;`")),
                _ => {}
            }
        }
    }

    /// Parses `.file 1 "name"{, time, bytes}` after the directive.
    pub(super) fn file(&mut self) -> Result<(), ParseError> {
        let number = literal::integer_expression(&mut self.lexer)?;
        let Token::Text(text) = self.lexer.take()? else {
            return Err(self.lexer.expected("the name of a file"));
        };
        while self.lexer.take_mark(b',')? {
            literal::integer_expression(&mut self.lexer)?;
        }
        let index = self.file_index(number);
        self.module.files[index as usize] = text.to_string();
        Ok(())
    }

    fn item(&mut self) -> Result<(), ParseError> {
        let mut is_extern = false;
        loop {
            match self.lexer.peek() {
                Token::Directive("extern") => is_extern = true,
                Token::Directive("visible" | "weak" | "common") => {}
                _ => break,
            }
            self.lexer.take()?;
        }
        let Token::Directive(name) = self.lexer.peek() else {
            return Err(self.lexer.expected("a directive"));
        };
        if variable_space(name).is_some() || name == "attribute" {
            let variables = self.variables(is_extern)?;
            self.module.variables.extend(variables);
            return Ok(());
        }
        match name {
            "version" => {
                self.lexer.take()?;
                let text = self.lexer.take_number_text("a version")?;
                let parts = text
                    .split_once('.')
                    .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
                self.module.version =
                    parts.ok_or_else(|| self.lexer.error(format!("`{text}` is no version")))?;
            }
            "target" => {
                self.lexer.take()?;
                loop {
                    let word = self.lexer.expect_word("a target")?;
                    let target = self.name(word);
                    self.module.target.push(target);
                    if !self.lexer.take_mark(b',')? {
                        break;
                    }
                }
            }
            "address_size" => {
                self.lexer.take()?;
                self.module.address_bits = literal::integer_expression(&mut self.lexer)? as u32;
            }
            "file" => {
                self.lexer.take()?;
                self.file()?;
            }
            "loc" | "pragma" => self.skip_directive(name)?,
            "section" => self.skip_section()?,
            "alias" => {
                self.lexer.take()?;
                let word = self.lexer.expect_word("a function")?;
                let alias = self.name(word);
                self.lexer.expect_mark(b',')?;
                let word = self.lexer.expect_word("a function")?;
                let target = self.name(word);
                self.lexer.expect_mark(b';')?;
                self.module.aliases.push((alias, target));
            }
            "entry" | "func" => {
                let is_kernel = name == "entry";
                let function = self.function(is_kernel, is_extern)?;
                self.module.functions.push(function);
            }
            _ => return Err(self.lexer.expected("a directive of modules")),
        }
        Ok(())
    }

    fn skip_directive(&mut self, name: &str) -> Result<(), ParseError> {
        if name == "pragma" {
            return self.skip_past_semicolon();
        }
        self.lexer.take()?;
        while matches!(self.lexer.peek(), Token::Number(_) | Token::Mark(b',') | Token::Word(_)) {
            self.lexer.take()?;
        }
        Ok(())
    }

    fn skip_section(&mut self) -> Result<(), ParseError> {
        while self.lexer.peek() != Token::Mark(b'{') {
            if self.lexer.take()? == Token::End {
                return Err(self.lexer.expected("`{`"));
            }
        }
        loop {
            match self.lexer.take()? {
                Token::Mark(b'}') => return Ok(()),
                Token::End => return Err(self.lexer.expected("`}`")),
                _ => {}
            }
        }
    }

    /// Parses the variables of one statement, from the directive of the space to the semicolon.
    pub(super) fn variables(&mut self, is_extern: bool) -> Result<Vec<Variable>, ParseError> {
        let template = self.variable_head(is_extern)?;
        let mut variables = Vec::new();
        loop {
            let mut variable = template.clone();
            self.variable_name(&mut variable)?;
            if self.lexer.take_mark(b'=')? {
                self.initializer(&mut variable.initial)?;
            }
            self.check_size(&variable)?;
            variables.push(variable);
            if self.lexer.take_mark(b';')? {
                return Ok(variables);
            }
            self.lexer.expect_mark(b',')?;
        }
    }

    /// Parses space, alignment and type.
    fn variable_head(&mut self, is_extern: bool) -> Result<Variable, ParseError> {
        let mut space = None;
        let mut alignment = None;
        let mut vector = 1;
        let ptx_line = self.lexer.next_line();
        loop {
            let Token::Directive(name) = self.lexer.peek() else {
                return Err(self.lexer.expected("a type"));
            };
            if name == "attribute" {
                self.lexer.take()?;
                self.skip_parentheses()?;
                continue;
            }
            if let Some(element) = Type::from_name(name) {
                self.lexer.take()?;
                // `.ptr .space .align n` of a kernel parameter describes its pointee.
                if self.lexer.take_directive("ptr")? {
                    while let Token::Directive(name) = self.lexer.peek() {
                        self.lexer.take()?;
                        if name == "align" {
                            literal::integer_expression(&mut self.lexer)?;
                        }
                    }
                }
                let alignment = alignment.unwrap_or(element.bytes() * vector);
                return Ok(Variable {
                    name: self.name(""),
                    space,
                    is_extern,
                    alignment,
                    element,
                    vector,
                    dimensions: Vec::new(),
                    initial: Vec::new(),
                    ptx_line,
                });
            }
            self.lexer.take()?;
            match name {
                "align" => {
                    alignment = Some(self.alignment()?);
                }
                "v2" => vector = 2,
                "v4" => vector = 4,
                "reg" => space = None,
                _ => match variable_space(name) {
                    Some(found) => space = Some(found),
                    None => {
                        return Err(self
                            .lexer
                            .error(format!("`.{name}` says nothing about a variable")));
                    }
                },
            }
        }
    }

    fn alignment(&mut self) -> Result<u32, ParseError> {
        let bytes = literal::integer_expression(&mut self.lexer)?;
        let fits = bytes.is_power_of_two() && bytes <= ALIGNMENT_MAX;
        fits.then_some(bytes as u32).ok_or_else(|| {
            let expected = format!("expected a power of two up to {ALIGNMENT_MAX}");
            self.lexer.error(format!("{expected} as alignment, got {bytes}"))
        })
    }

    /// Checks that the size fits 32 bits, as all later stages assume.
    fn check_size(&self, variable: &Variable) -> Result<(), ParseError> {
        let bytes = variable.bytes();
        if u32::try_from(bytes).is_ok() {
            return Ok(());
        }
        let name = &variable.name;
        Err(self.lexer.error(format!("expected less than 4 GiB of `{name}`, got {bytes} bytes")))
    }

    fn variable_name(&mut self, variable: &mut Variable) -> Result<(), ParseError> {
        variable.ptx_line = self.lexer.next_line();
        let word = self.lexer.expect_word("a variable")?;
        variable.name = self.name(word);
        while self.lexer.take_mark(b'[')? {
            if self.lexer.take_mark(b']')? {
                variable.dimensions.push(0);
                continue;
            }
            variable.dimensions.push(literal::integer_expression(&mut self.lexer)?);
            self.lexer.expect_mark(b']')?;
        }
        Ok(())
    }

    fn initializer(&mut self, values: &mut Vec<InitialValue>) -> Result<(), ParseError> {
        match self.lexer.peek() {
            Token::Mark(b'{') => {
                self.lexer.take()?;
                if self.lexer.take_mark(b'}')? {
                    return Ok(());
                }
                self.lexer.enter()?;
                loop {
                    self.initializer(values)?;
                    if self.lexer.take_mark(b'}')? {
                        self.lexer.leave();
                        return Ok(());
                    }
                    self.lexer.expect_mark(b',')?;
                }
            }
            Token::Word(_) => self.initial_address(values, None),
            _ => match literal::expression(&mut self.lexer)? {
                Literal::Integer(mask) if self.lexer.peek() == Token::Mark(b'(') => {
                    self.lexer.take()?;
                    // Index of the byte in an 8-byte address.
                    let byte = (mask.trailing_zeros() / 8).min(7);
                    self.initial_address(values, Some(byte))?;
                    self.lexer.expect_mark(b')')
                }
                Literal::Integer(value) => {
                    values.push(InitialValue::Bits(value));
                    Ok(())
                }
                Literal::Single(bits) => {
                    values.push(InitialValue::Bits(u64::from(bits)));
                    Ok(())
                }
                Literal::Double(bits) => {
                    values.push(InitialValue::Bits(bits));
                    Ok(())
                }
            },
        }
    }

    /// Parses `name + 4`, `generic(name) + 4` or `generic(name + 4)`.
    fn initial_address(
        &mut self,
        values: &mut Vec<InitialValue>,
        byte: Option<u32>,
    ) -> Result<(), ParseError> {
        let mut word = self.lexer.expect_word("a variable")?;
        let mut offset = 0;
        let generic = word == "generic" && self.lexer.take_mark(b'(')?;
        if generic {
            word = self.lexer.expect_word("a variable")?;
            offset = self.signed_offset()?.unwrap_or(0);
            self.lexer.expect_mark(b')')?;
        }
        let name = self.name(word);
        offset = self.signed_offset()?.unwrap_or(0).wrapping_add(offset);
        values.push(InitialValue::Address { name, offset, generic, byte });
        Ok(())
    }

    fn skip_parentheses(&mut self) -> Result<(), ParseError> {
        self.lexer.expect_mark(b'(')?;
        let mut depth = 1;
        while depth > 0 {
            match self.lexer.take()? {
                Token::Mark(b'(') => depth += 1,
                Token::Mark(b')') => depth -= 1,
                Token::End => return Err(self.lexer.expected("`)`")),
                _ => {}
            }
        }
        Ok(())
    }

    /// Parses a function from `.entry` or `.func` on.
    fn function(&mut self, is_kernel: bool, is_extern: bool) -> Result<Function, ParseError> {
        let ptx_line = self.lexer.next_line();
        self.lexer.take()?;
        if self.lexer.take_directive("attribute")? {
            self.skip_parentheses()?;
        }
        let returns =
            if self.lexer.peek() == Token::Mark(b'(') { self.parameters()? } else { Vec::new() };
        let word = self.lexer.expect_word("the name of a function")?;
        let name = self.name(word);
        let parameters =
            if self.lexer.peek() == Token::Mark(b'(') { self.parameters()? } else { Vec::new() };
        let mut directives = Vec::new();
        let body = loop {
            match self.lexer.peek() {
                Token::Mark(b';') => {
                    self.lexer.take()?;
                    break None;
                }
                Token::Mark(b'{') => {
                    self.lexer.take()?;
                    break Some(self.body()?);
                }
                Token::Directive("pragma") => self.skip_past_semicolon()?,
                Token::Directive(directive) => {
                    self.lexer.take()?;
                    let name = self.name(directive);
                    let mut values = Vec::new();
                    while let Token::Number(_) = self.lexer.peek() {
                        values.push(literal::integer_expression(&mut self.lexer)?);
                        if !self.lexer.take_mark(b',')? {
                            break;
                        }
                    }
                    directives.push(Directive { name, values });
                }
                // A prototype that another declaration follows at once.
                _ => return Err(self.lexer.expected("`{` or `;`")),
            }
        };
        Ok(Function { name, is_kernel, is_extern, returns, parameters, directives, body, ptx_line })
    }

    fn parameters(&mut self) -> Result<Vec<Variable>, ParseError> {
        self.lexer.expect_mark(b'(')?;
        let mut parameters = Vec::new();
        if self.lexer.take_mark(b')')? {
            return Ok(parameters);
        }
        loop {
            let mut variable = self.variable_head(false)?;
            self.variable_name(&mut variable)?;
            self.check_size(&variable)?;
            parameters.push(variable);
            if self.lexer.take_mark(b')')? {
                return Ok(parameters);
            }
            self.lexer.expect_mark(b',')?;
        }
    }
}

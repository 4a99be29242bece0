//! Function bodies.

use super::ParseError;
use super::ast::{Guard, Instruction, RegisterDeclaration, Statement, StatementKind};
use super::lexer::Token;
use super::literal;
use super::parser::{Parser, variable_space};
use crate::decode::Type;

impl Parser<'_> {
    /// Parses a body after the opening brace, up to and including the closing brace.
    pub(super) fn body(&mut self) -> Result<Vec<Statement>, ParseError> {
        let mut statements = Vec::new();
        let mut depth = 0u32;
        let mut source = None;
        loop {
            let ptx_line = self.lexer.next_line();
            let kind = match self.lexer.peek() {
                Token::Mark(b'{') => {
                    self.lexer.take()?;
                    depth += 1;
                    StatementKind::ScopeBegin
                }
                Token::Mark(b'}') => {
                    self.lexer.take()?;
                    if depth == 0 {
                        return Ok(statements);
                    }
                    depth -= 1;
                    StatementKind::ScopeEnd
                }
                // Inline assembly leaves empty statements.
                Token::Mark(b';') => {
                    self.lexer.take()?;
                    continue;
                }
                Token::Directive("loc") => {
                    self.lexer.take()?;
                    source = self.location()?;
                    continue;
                }
                Token::Directive("reg") => {
                    self.lexer.take()?;
                    StatementKind::Registers(self.registers()?)
                }
                Token::Directive("pragma") => {
                    self.skip_past_semicolon()?;
                    continue;
                }
                Token::Directive("file") => {
                    self.lexer.take()?;
                    self.file()?;
                    continue;
                }
                Token::Directive(name) if variable_space(name).is_some() || name == "attribute" => {
                    for variable in self.variables(false)? {
                        statements.push(Statement {
                            ptx_line: variable.ptx_line,
                            kind: StatementKind::Variable(variable),
                        });
                    }
                    continue;
                }
                Token::Directive("branchtargets" | "calltargets" | "callprototype") => {
                    return Err(self.lexer.error("expected a label before a table".to_string()));
                }
                Token::Mark(b'@') => {
                    self.lexer.take()?;
                    let negated = self.lexer.take_mark(b'!')?;
                    let word = self.lexer.expect_word("a predicate register")?;
                    let register = self.name(word);
                    let opcode = self.lexer.expect_word("an instruction")?;
                    self.instruction(Some(Guard { register, negated }), opcode, source)?
                }
                Token::Word(word) => {
                    self.lexer.take()?;
                    if self.lexer.take_mark(b':')? {
                        self.labeled(word)?
                    } else {
                        self.instruction(None, word, source)?
                    }
                }
                _ => return Err(self.lexer.expected("a statement")),
            };
            statements.push(Statement { ptx_line, kind });
        }
    }

    fn labeled(&mut self, word: &str) -> Result<StatementKind, ParseError> {
        let name = self.name(word);
        match self.lexer.peek() {
            Token::Directive("branchtargets") => {
                self.lexer.take()?;
                let mut targets = Vec::new();
                loop {
                    let target = self.lexer.expect_word("a label")?;
                    targets.push(self.name(target));
                    if self.lexer.take_mark(b';')? {
                        return Ok(StatementKind::BranchTargets { name, targets });
                    }
                    self.lexer.expect_mark(b',')?;
                }
            }
            Token::Directive("calltargets" | "callprototype") => {
                self.skip_past_semicolon()?;
                Ok(StatementKind::CallTable(name))
            }
            _ => Ok(StatementKind::Label(name)),
        }
    }

    fn instruction(
        &mut self,
        guard: Option<Guard>,
        word: &str,
        source: Option<(u32, u32)>,
    ) -> Result<StatementKind, ParseError> {
        let opcode = if let Token::Directive(_) = self.lexer.peek() {
            // Blanks may separate the words of an opcode.
            let mut text = word.to_string();
            while let Token::Directive(more) = self.lexer.peek() {
                self.lexer.take()?;
                text.push('.');
                text.push_str(more);
            }
            self.opcode(&text)
        } else {
            self.opcode(word)
        };
        let is_call = &*opcode.words[0] == "call";
        let operands = self.operands(is_call)?;
        Ok(StatementKind::Instruction(Box::new(Instruction { guard, opcode, operands, source })))
    }

    /// Parses `.loc file line column {, function_name label {+ offset}, inlined_at file line
    /// column}`.
    fn location(&mut self) -> Result<Option<(u32, u32)>, ParseError> {
        let file = literal::integer_expression(&mut self.lexer)?;
        let line = literal::integer_expression(&mut self.lexer)?;
        literal::integer_expression(&mut self.lexer)?;
        while self.lexer.take_mark(b',')? {
            match self.lexer.expect_word("`function_name` or `inlined_at`")? {
                "function_name" => {
                    self.lexer.expect_word("a label")?;
                    if self.lexer.take_mark(b'+')? {
                        literal::integer_expression(&mut self.lexer)?;
                    }
                }
                "inlined_at" => {
                    for _ in 0..3 {
                        literal::integer_expression(&mut self.lexer)?;
                    }
                }
                _ => return Err(self.lexer.expected("`function_name` or `inlined_at`")),
            }
        }
        Ok((line > 0).then(|| (self.file_index(file), line as u32)))
    }

    fn registers(&mut self) -> Result<RegisterDeclaration, ParseError> {
        let mut vector = 1;
        let register_type = loop {
            match self.lexer.peek() {
                Token::Directive("v2") => vector = 2,
                Token::Directive("v4") => vector = 4,
                Token::Directive(name) => match Type::from_name(name) {
                    Some(found) => {
                        self.lexer.take()?;
                        break found;
                    }
                    None => return Err(self.lexer.expected("a type of registers")),
                },
                _ => return Err(self.lexer.expected("a type of registers")),
            }
            self.lexer.take()?;
        };
        let mut names = Vec::new();
        loop {
            let word = self.lexer.expect_word("a register")?;
            let name = self.name(word);
            let count = if self.lexer.take_mark(b'<')? {
                let text = self.lexer.take_number_text("a count of registers")?;
                let count = text.parse().map_err(|_| {
                    self.lexer.error(format!("expected a count of registers, got `{text}`"))
                })?;
                self.lexer.expect_mark(b'>')?;
                Some(count)
            } else {
                None
            };
            names.push((name, count));
            if self.lexer.take_mark(b';')? {
                return Ok(RegisterDeclaration { register_type, vector, names });
            }
            self.lexer.expect_mark(b',')?;
        }
    }
}

//! Syntax tree of a PTX file.

use std::fmt;
use std::sync::Arc;

use crate::decode::{Space, Type};

/// An identifier. Equal identifiers of a module share one string.
pub type Name = Arc<str>;

/// A PTX file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Module {
    /// `.version`, major and minor.
    pub version: (u32, u32),
    /// `.target`; the first name is the architecture, such as `sm_100a`.
    pub target: Vec<Name>,
    /// `.address_size`.
    pub address_bits: u32,
    /// Names from `.file` directives; [`Instruction::source`] holds indices into this list.
    pub files: Vec<String>,
    /// Module-scope variables.
    pub variables: Vec<Variable>,
    /// Kernels and functions, prototypes included.
    pub functions: Vec<Function>,
    /// `.alias`: the alias and the aliased name.
    pub aliases: Vec<(Name, Name)>,
}

impl Module {
    /// Returns the kernels that have a body, in file order.
    pub fn kernels(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.is_kernel && function.body.is_some())
    }

    /// Returns the definition of a function by name, or else a prototype.
    pub fn function(&self, name: &str) -> Option<&Function> {
        let name = self
            .aliases
            .iter()
            .find(|(alias, _)| &**alias == name)
            .map_or(name, |(_, target)| target);
        let mut found = self.functions.iter().filter(|function| &*function.name == name);
        let first = found.next()?;
        if first.body.is_some() {
            return Some(first);
        }
        found.find(|function| function.body.is_some()).or(Some(first))
    }
}

/// An `.entry` or `.func`.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Name of the function.
    pub name: Name,
    /// `.entry`.
    pub is_kernel: bool,
    /// `.extern`.
    pub is_extern: bool,
    /// Return values of a `.func`.
    pub returns: Vec<Variable>,
    /// Parameters; those of kernels are in [`Space::Parameter`].
    pub parameters: Vec<Variable>,
    /// Directives between the parameters and the body.
    pub directives: Vec<Directive>,
    /// The body; `None` for prototypes.
    pub body: Option<Vec<Statement>>,
    /// First line of the function, from 1.
    pub ptx_line: u32,
}

/// A directive with numbers, such as `.maxntid 256, 1, 1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directive {
    /// Name, without the dot.
    pub name: Name,
    /// Numeric arguments.
    pub values: Vec<u64>,
}

/// A variable or a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Variable {
    /// Name of the variable.
    pub name: Name,
    /// Memory space; `None` for parameters in registers (`.reg` of a `.func`).
    pub space: Option<Space>,
    /// `.extern`.
    pub is_extern: bool,
    /// Alignment of the first byte: from `.align`, otherwise of the element type.
    pub alignment: u32,
    /// Type of one vector element.
    pub element: Type,
    /// Elements of a vector: 1, 2 or 4.
    pub vector: u32,
    /// Array dimensions; empty for scalars; the first is 0 for `name[]`.
    pub dimensions: Vec<u64>,
    /// Initial values in order; the remaining elements are zero.
    pub initial: Vec<InitialValue>,
    /// Line of the declaration, from 1.
    pub ptx_line: u32,
}

impl Variable {
    /// Returns the size in bytes; 0 for `name[]` without an initializer. [`parse`](super::parse)
    /// only returns variables below 4 GiB.
    pub fn bytes(&self) -> u64 {
        let one = u64::from(self.element.bytes() * self.vector);
        let inner = self.dimensions.iter().skip(1).fold(one, |a, &b| a.saturating_mul(b));
        match self.dimensions.first() {
            None => one,
            Some(0) => {
                let given = self.initial.len() as u64 * u64::from(self.element.bytes());
                given.checked_next_multiple_of(inner.max(1)).unwrap_or(u64::MAX)
            }
            Some(first) => inner.saturating_mul(*first),
        }
    }
}

/// One value of an initializer.
#[derive(Clone, Debug, PartialEq)]
pub enum InitialValue {
    /// Bits of an integer or a float.
    Bits(u64),
    /// Address of a variable or function, plus bytes.
    Address {
        /// Name of the variable or function.
        name: Name,
        /// Byte offset.
        offset: i64,
        /// Whether the value is a generic address.
        generic: bool,
        /// Byte index of a `0xff..(name)` mask; `None` for the whole address.
        byte: Option<u32>,
    },
}

/// One statement of a body.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// Line, from 1.
    pub ptx_line: u32,
    /// The statement itself.
    pub kind: StatementKind,
}

/// Kinds of statements.
#[derive(Clone, Debug, PartialEq)]
pub enum StatementKind {
    /// `{`.
    ScopeBegin,
    /// `}`.
    ScopeEnd,
    /// `name:`.
    Label(Name),
    /// `.reg`.
    Registers(RegisterDeclaration),
    /// `.local`, `.shared`, `.param`, `.global`, `.const`.
    Variable(Variable),
    /// `name: .branchtargets a, b;`.
    BranchTargets {
        /// Name of the table.
        name: Name,
        /// Labels of the table.
        targets: Vec<Name>,
    },
    /// `name: .callprototype ..;` and `.calltargets`: calls by pointer, refused when used.
    CallTable(Name),
    /// An instruction.
    Instruction(Box<Instruction>),
}

/// `.reg .b32 %r<10>, a;`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisterDeclaration {
    /// Type of each register.
    pub register_type: Type,
    /// Vector elements of each register; more than 1 for `.v2` and `.v4`.
    pub vector: u32,
    /// Names. A name with a count is a prefix of the registers `name0`, `name1` and so on.
    pub names: Vec<(Name, Option<u32>)>,
}

/// A guard, an opcode and operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Instruction {
    /// `@p`.
    pub guard: Option<Guard>,
    /// `ld.global.u32`.
    pub opcode: Arc<Opcode>,
    /// The operands.
    pub operands: Vec<Operand>,
    /// Index into [`Module::files`] and line, from `.loc`.
    pub source: Option<(u32, u32)>,
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(guard) = &self.guard {
            write!(f, "@{}{} ", if guard.negated { "!" } else { "" }, guard.register)?;
        }
        f.write_str(&self.opcode.text)?;
        for (position, operand) in self.operands.iter().enumerate() {
            write!(f, "{}{operand}", if position == 0 { " " } else { ", " })?;
        }
        f.write_str(";")
    }
}

/// A guard predicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// A predicate register.
    pub register: Name,
    /// `@!p`.
    pub negated: bool,
}

/// An opcode, split at the dots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opcode {
    /// As written, `mbarrier.init.shared::cta.b64`.
    pub text: Box<str>,
    /// Words between the dots: `mbarrier`, `init`, `shared::cta`, `b64`.
    pub words: Box<[Box<str>]>,
}

/// Kinds of operands.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register, a special register, a label, a variable, a function.
    Name(Name),
    /// `name + 4` outside of brackets.
    Offset(Name, i64),
    /// An integer; negative values in two's complement.
    Integer(u64),
    /// `0f3F800000`.
    Single(u32),
    /// `0d3FF0000000000000`, or a decimal float.
    Double(u64),
    /// `[base + offset]`.
    Address {
        /// A register or a variable; `None` for a plain number.
        base: Option<Name>,
        /// Byte offset.
        offset: i64,
    },
    /// `[base + offset, {a, b}]`.
    TensorAddress {
        /// A register or a variable.
        base: Option<Name>,
        /// Byte offset.
        offset: i64,
        /// The operands in braces.
        coordinates: Vec<Operand>,
    },
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `!a`.
    Negated(Box<Operand>),
    /// `(a, b)` of a call.
    Group(Vec<Operand>),
    /// `_`.
    Sink,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, operands: &[Operand]| {
            for (position, operand) in operands.iter().enumerate() {
                write!(f, "{}{operand}", if position == 0 { "" } else { ", " })?;
            }
            Ok(())
        };
        let place = |f: &mut fmt::Formatter<'_>, base: &Option<Name>, offset: i64| match base {
            Some(base) if offset == 0 => write!(f, "{base}"),
            Some(base) => write!(f, "{base}+{offset}"),
            None => write!(f, "{offset}"),
        };
        match self {
            Operand::Name(name) => f.write_str(name),
            Operand::Offset(name, offset) => write!(f, "{name}+{offset}"),
            Operand::Integer(value) => write!(f, "{}", *value as i64),
            Operand::Single(bits) => write!(f, "0f{bits:08X}"),
            Operand::Double(bits) => write!(f, "0d{bits:016X}"),
            Operand::Address { base, offset } => {
                f.write_str("[")?;
                place(f, base, *offset)?;
                f.write_str("]")
            }
            Operand::TensorAddress { base, offset, coordinates } => {
                f.write_str("[")?;
                place(f, base, *offset)?;
                f.write_str(", {")?;
                list(f, coordinates)?;
                f.write_str("}]")
            }
            Operand::Vector(operands) => {
                f.write_str("{")?;
                list(f, operands)?;
                f.write_str("}")
            }
            Operand::Pair(first, second) => write!(f, "{first}|{second}"),
            Operand::Negated(operand) => write!(f, "!{operand}"),
            Operand::Group(operands) => {
                f.write_str("(")?;
                list(f, operands)?;
                f.write_str(")")
            }
            Operand::Sink => f.write_str("_"),
        }
    }
}

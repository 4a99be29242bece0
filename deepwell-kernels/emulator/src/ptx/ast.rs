//! What a PTX file says.

use std::fmt;
use std::sync::Arc;

use crate::decode::{Space, Type};

/// An identifier; equal ones of a module share their text.
pub type Name = Arc<str>;

/// A file of PTX.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Module {
    /// `.version`, major and minor.
    pub version: (u32, u32),
    /// `.target`: the first is the architecture, such as `sm_100a`.
    pub target: Vec<Name>,
    /// `.address_size`.
    pub address_bits: u32,
    /// Names of `.file`; what [`Instruction::source`] counts.
    pub files: Vec<String>,
    /// Variables outside of functions.
    pub variables: Vec<Variable>,
    /// Kernels and functions, prototypes included.
    pub functions: Vec<Function>,
    /// `.alias`: a second name and the first.
    pub aliases: Vec<(Name, Name)>,
}

impl Module {
    /// The kernels that have a body, in the order of the file.
    pub fn kernels(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.is_kernel && function.body.is_some())
    }

    /// The function with a body under a name, or else a prototype of it.
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

/// `.entry` or `.func`.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: Name,
    /// `.entry`.
    pub is_kernel: bool,
    /// `.extern`.
    pub is_extern: bool,
    /// What a `.func` returns.
    pub returns: Vec<Variable>,
    /// What it takes. Those of kernels are of [`Space::Parameter`].
    pub parameters: Vec<Variable>,
    /// What stands between the parameters and the body.
    pub directives: Vec<Directive>,
    /// None for prototypes.
    pub body: Option<Vec<Statement>>,
    /// Where it begins, from 1.
    pub ptx_line: u32,
}

/// A directive with numbers, such as `.maxntid 256, 1, 1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directive {
    /// Without the dot.
    pub name: Name,
    /// Its numbers.
    pub values: Vec<u64>,
}

/// A variable or a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Variable {
    /// Its name.
    pub name: Name,
    /// Where it lives; `None` for parameters in registers (`.reg` of a `.func`).
    pub space: Option<Space>,
    /// `.extern`.
    pub is_extern: bool,
    /// Of the first byte: `.align`, or of its elements.
    pub alignment: u32,
    /// Of one element of a vector.
    pub element: Type,
    /// Elements of a vector: 1, 2 or 4.
    pub vector: u32,
    /// Sizes of an array; empty for scalars; the first is 0 for `name[]`.
    pub dimensions: Vec<u64>,
    /// Values in order; the rest are zeros.
    pub initial: Vec<InitialValue>,
    /// Where it stands, from 1.
    pub ptx_line: u32,
}

impl Variable {
    /// Bytes that it takes; 0 for `name[]` that has no initializer. What [`parse`](super::parse)
    /// gives takes less than 4 GiB.
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
    /// Bits, of integers or of floats.
    Bits(u64),
    /// Address of a variable or function, plus bytes.
    Address {
        /// Of which.
        name: Name,
        /// Bytes.
        offset: i64,
        /// As a generic address.
        generic: bool,
        /// `0xff..(name)`: which byte of the address.
        byte: Option<u32>,
    },
}

/// One statement of a body.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// From 1.
    pub ptx_line: u32,
    /// What it is.
    pub kind: StatementKind,
}

/// Statements.
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
        /// Of the table.
        name: Name,
        /// Labels.
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
    /// Of each.
    pub register_type: Type,
    /// Elements of each; more than 1 for `.v2` and `.v4`.
    pub vector: u32,
    /// Names; with a count, a prefix for `name0` and so on.
    pub names: Vec<(Name, Option<u32>)>,
}

/// A guard, an opcode and operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Instruction {
    /// `@p`.
    pub guard: Option<Guard>,
    /// `ld.global.u32`.
    pub opcode: Arc<Opcode>,
    /// What follows.
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

/// A guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// A predicate register.
    pub register: Name,
    /// `@!p`.
    pub negated: bool,
}

/// Words of an opcode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opcode {
    /// As written, `mbarrier.init.shared::cta.b64`.
    pub text: Box<str>,
    /// Between its dots: `mbarrier`, `init`, `shared::cta`, `b64`.
    pub words: Box<[Box<str>]>,
}

/// Operands.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register, a special register, a label, a variable, a function.
    Name(Name),
    /// `name + 4` outside of brackets.
    Offset(Name, i64),
    /// An integer; negative ones in two's complement.
    Integer(u64),
    /// `0f3F800000`.
    Single(u32),
    /// `0d3FF0000000000000`, or a decimal float.
    Double(u64),
    /// `[base + offset]`.
    Address {
        /// A register or a variable; `None` for a number alone.
        base: Option<Name>,
        /// Bytes.
        offset: i64,
    },
    /// `[base + offset, {a, b}]`.
    TensorAddress {
        /// A register or a variable.
        base: Option<Name>,
        /// Bytes.
        offset: i64,
        /// What stands in braces.
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

//! Lowering of a kernel's text to a program.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::contract::{Fused, find};
use super::layout;
use super::scope::{Binding, Labels, Scope, Tops};
use super::types::{PredicateSource, Register, Source, Space, Type};
use super::unknown::{DecodeError, UnknownForm};
use super::{DecodeOptions, GlobalAddresses, Program};
use super::{Instruction, Step};
use crate::ptx::{Function, Instruction as Line, Module, Name, Statement, StatementKind};

/// Result of a family's decoder: the last instruction of the line.
pub(super) type Decoded = Result<Instruction, String>;

/// Deepest nesting of calls; deeper nesting counts as endless recursion.
const DEPTH_LIMIT: usize = 64;
/// Most statements after inlining, per statement of the text. Without a limit, functions that each
/// call the next one twice would turn a few lines into 2^64 statements.
const STATEMENTS_PER_STATEMENT: usize = 256;

/// State of the lowering.
pub(super) struct Lowering<'m> {
    pub(super) module: &'m Module,
    module_names: HashMap<Name, Binding>,
    function_shared: HashMap<Name, u64>,
    steps: Vec<Step>,
    unknown: BTreeMap<(String, String), UnknownForm>,
    scopes: Vec<Scope>,
    pub(super) tops: Tops,
    most: Tops,
    /// Position of each label, by label number.
    label_positions: Vec<Option<u32>>,
    frames: Vec<Frame>,
    labels_of: HashMap<Name, Rc<Labels>>,
    options: DecodeOptions,
    fused_of: HashMap<Name, Rc<HashMap<usize, Fused>>>,
    guard: Option<PredicateSource>,
    ptx_line: u32,
    source: Option<(u32, u32)>,
    /// Number of statements of inlined functions so far, and its limit.
    statements_walked: usize,
    statements_max: usize,
}

/// An inlined function in progress.
struct Frame {
    name: Name,
    labels: Rc<Labels>,
    first_label: u32,
    /// Number of the label after the function's last instruction.
    end_label: u32,
    scopes_seen: usize,
}

impl<'m> Lowering<'m> {
    /// Decodes one kernel.
    pub(super) fn run(
        module: &'m Module,
        kernel: &'m Function,
        globals: &GlobalAddresses,
        options: DecodeOptions,
    ) -> Result<Program, DecodeError> {
        let functions = layout::reachable(module, kernel);
        let (shared, shared_static_bytes) = layout::shared(module, &functions)?;
        let (constants, constant_bytes) = layout::constants(module, globals)?;
        let (parameters, parameter_bytes) = layout::parameters(kernel);
        let statements =
            functions.iter().flat_map(|function| &function.body).map(Vec::len).sum::<usize>();
        let mut module_names = HashMap::new();
        for variable in &module.variables {
            let address = match variable.space {
                Some(Space::Shared) => shared.get(&variable.name).copied(),
                Some(Space::Constant) => constants.get(&variable.name).copied(),
                Some(Space::Global) => globals.get(&*variable.name).copied(),
                _ => None,
            };
            if let (Some(space), Some(address)) = (variable.space, address) {
                let bytes = variable.bytes() as u32;
                module_names
                    .insert(variable.name.clone(), Binding::Variable { space, address, bytes });
            }
        }
        let mut lowering = Lowering {
            module,
            module_names,
            function_shared: shared,
            steps: Vec::new(),
            unknown: BTreeMap::new(),
            scopes: Vec::new(),
            tops: Tops::default(),
            most: Tops::default(),
            label_positions: Vec::new(),
            frames: Vec::new(),
            labels_of: HashMap::new(),
            options,
            fused_of: HashMap::new(),
            guard: None,
            ptx_line: kernel.ptx_line,
            source: None,
            statements_walked: 0,
            statements_max: STATEMENTS_PER_STATEMENT * statements,
        };
        let bindings = kernel.parameters.iter().zip(&parameters).map(|(parameter, place)| {
            let binding = Binding::Variable {
                space: Space::Parameter,
                address: u64::from(place.offset),
                bytes: place.bytes,
            };
            (parameter.name.clone(), binding)
        });
        lowering.function(kernel, bindings.collect(), &constants, globals);
        lowering.guard = None;
        lowering.emit(Instruction::Exit);
        lowering.resolve_labels();
        if !lowering.unknown.is_empty() {
            let mut forms: Vec<UnknownForm> = lowering.unknown.into_values().collect();
            forms.sort_by_key(|form| form.ptx_line);
            return Err(DecodeError::UnknownForms(forms));
        }
        let directive = |name: &str| -> Option<[u32; 3]> {
            let found = kernel.directives.iter().find(|directive| &*directive.name == name)?;
            let at = |axis: usize| found.values.get(axis).map_or(1, |value| *value as u32);
            Some([at(0), at(1), at(2)])
        };
        Ok(Program {
            name: kernel.name.to_string(),
            steps: lowering.steps,
            predicate_count: lowering.most.predicates,
            word_count: lowering.most.words,
            long_count: lowering.most.longs,
            local_bytes: lowering.most.local_bytes,
            shared_static_bytes,
            parameters,
            parameter_bytes,
            constants: constant_bytes,
            required_threads: directive("reqntid"),
            max_threads: directive("maxntid"),
            min_ctas_per_sm: directive("minnctapersm").map(|of| of[0]),
            max_registers: directive("maxnreg").map(|of| of[0]),
            required_cluster: directive("reqnctapercluster"),
            explicit_cluster: directive("explicitcluster").is_some(),
            target: module.target.first().map_or(String::new(), |target| target.to_string()),
        })
    }

    /// Appends an instruction under the guard of the line.
    pub(super) fn emit(&mut self, instruction: Instruction) {
        let (guard, ptx_line, source) = (self.guard, self.ptx_line, self.source);
        self.steps.push(Step { guard, instruction, ptx_line, source });
    }

    /// Appends an instruction under another guard.
    pub(super) fn emit_guarded(&mut self, guard: Option<PredicateSource>, what: Instruction) {
        let outer = std::mem::replace(&mut self.guard, guard);
        self.emit(what);
        self.guard = outer;
    }

    /// Number of instructions so far.
    pub(super) fn step_count(&self) -> usize {
        self.steps.len()
    }

    /// Changes the destination of the last instruction, a read of a special register, from `from`
    /// to `to`.
    pub(super) fn redirect_special(&mut self, from: Source, to: Register) -> bool {
        if let Some(Step { instruction: Instruction::Special { destination, .. }, .. }) =
            self.steps.last_mut()
            && Source::Register(*destination) == from
        {
            *destination = to;
            return true;
        }
        false
    }

    /// Guard of the line.
    pub(super) fn guard(&self) -> Option<PredicateSource> {
        self.guard
    }

    /// Looks up a name.
    pub(super) fn find(&self, name: &str) -> Option<Binding> {
        for scope in self.scopes.iter().rev() {
            if let Some(binding) = scope.find(name) {
                return Some(binding);
            }
            if scope.is_root {
                break;
            }
        }
        self.module_names.get(name).copied()
    }

    /// Allocates a register for this line only.
    pub(super) fn temporary(&mut self, value_type: Type) -> Result<Register, String> {
        match self.tops.allocate(value_type, 1)? {
            Binding::Value(register) => Ok(register),
            _ => Err(format!("a temporary of type `.{value_type}` is not known")),
        }
    }

    /// Allocates a predicate register for this line only.
    pub(super) fn temporary_predicate(&mut self) -> Result<u32, String> {
        match self.tops.allocate(Type::Predicate, 1)? {
            Binding::Predicate(index) => Ok(index),
            _ => Err("no predicate".to_string()),
        }
    }

    /// Allocates local memory until the end of the scope. Returns the offset of the first byte.
    pub(super) fn local_slot(&mut self, bytes: u32, alignment: u32) -> Result<u32, String> {
        let first = self
            .tops
            .local_bytes
            .checked_next_multiple_of(alignment.max(1))
            .and_then(|first| Some((first, first.checked_add(bytes)?)))
            .ok_or("too much local memory")?;
        self.tops.local_bytes = first.1;
        Ok(first.0)
    }

    /// Returns the number of a label by name.
    pub(super) fn label(&self, name: &str) -> Result<u32, String> {
        let frame = self.frames.last().ok_or("no function")?;
        for scope in self.scopes.iter().rev() {
            if let Some(label) = frame.labels.find(scope.ordinal, name) {
                return Ok(frame.first_label + label);
            }
            if scope.is_root {
                break;
            }
        }
        Err(format!("label `{name}` is not there"))
    }

    /// Returns the labels of a branch table.
    pub(super) fn table(&self, name: &str) -> Result<Box<[u32]>, String> {
        let frame = self.frames.last().ok_or("no function")?;
        for scope in self.scopes.iter().rev() {
            if let Some(table) = frame.labels.table(scope.ordinal, name) {
                return table.iter().map(|target| self.label(target)).collect();
            }
            if scope.is_root {
                break;
            }
        }
        Err(format!("table `{name}` is not there"))
    }

    /// Returns the label at the end of the function; `None` in the kernel itself.
    pub(super) fn return_label(&self) -> Option<u32> {
        (self.frames.len() > 1).then(|| self.frames.last().map(|frame| frame.end_label)).flatten()
    }

    /// Creates a label.
    pub(super) fn new_label(&mut self) -> u32 {
        self.label_positions.push(None);
        self.label_positions.len() as u32 - 1
    }

    /// Places a label before the next instruction.
    pub(super) fn place_label(&mut self, label: u32) {
        self.label_positions[label as usize] = Some(self.steps.len() as u32);
    }

    /// Checks that a call of `function` may be inlined here.
    pub(super) fn may_enter(&self, function: &Function) -> Result<(), String> {
        let name = &function.name;
        if self.frames.iter().any(|frame| frame.name == *name) {
            return Err(format!("`{name}` calls itself, which is not known"));
        }
        let body = function.body.as_ref().map_or(0, Vec::len);
        let is_much = self.statements_walked + body >= self.statements_max;
        if self.frames.len() >= DEPTH_LIMIT || is_much {
            return Err("too much is inlined".to_string());
        }
        Ok(())
    }

    /// Lowers a function with bound parameters.
    pub(super) fn function(
        &mut self,
        function: &'m Function,
        bindings: Vec<(Name, Binding)>,
        constants: &HashMap<Name, u64>,
        globals: &GlobalAddresses,
    ) {
        for variable in function.body.iter().flatten() {
            if let StatementKind::Variable(variable) = &variable.kind {
                let found = match variable.space {
                    Some(Space::Shared) => self.function_shared.get(&variable.name).copied(),
                    Some(Space::Constant) => constants.get(&variable.name).copied(),
                    Some(Space::Global) => globals.get(&*variable.name).copied(),
                    _ => None,
                };
                if let (Some(space), Some(address)) = (variable.space, found) {
                    let bytes = variable.bytes() as u32;
                    self.module_names
                        .insert(variable.name.clone(), Binding::Variable { space, address, bytes });
                }
            }
        }
        self.inline(function, bindings);
    }

    /// Lowers a function whose variables are already bound.
    pub(super) fn inline(&mut self, function: &'m Function, bindings: Vec<(Name, Binding)>) {
        let body = function.body.as_deref().unwrap_or_default();
        self.statements_walked += 1 + body.len();
        let labels = self
            .labels_of
            .entry(function.name.clone())
            .or_insert_with(|| Rc::new(Labels::new(body)))
            .clone();
        let first_label = self.label_positions.len() as u32;
        let count = labels.count as usize;
        self.label_positions.resize(self.label_positions.len() + count, None);
        let end_label = self.new_label();
        let name = function.name.clone();
        let contracts = self.options.contract_products;
        let fused = self
            .fused_of
            .entry(function.name.clone())
            .or_insert_with(|| Rc::new(if contracts { find(body) } else { HashMap::new() }))
            .clone();
        self.frames.push(Frame { name, labels, first_label, end_label, scopes_seen: 1 });
        let mut root = Scope::new(0, true, self.tops);
        for (name, binding) in bindings {
            root.bind(name, binding);
        }
        self.scopes.push(root);
        for (position, statement) in body.iter().enumerate() {
            let product = fused.get(&position).and_then(|fused| match &body[fused.product].kind {
                StatementKind::Instruction(product) => Some((&**product, fused.operand)),
                _ => None,
            });
            self.statement(statement, product);
        }
        self.close_scope();
        self.place_label(end_label);
        self.frames.pop();
    }

    fn close_scope(&mut self) {
        self.most = self.most.maximum(self.tops);
        if let Some(scope) = self.scopes.pop() {
            self.tops = scope.tops;
        }
    }

    fn statement(&mut self, statement: &'m Statement, product: Option<(&'m Line, usize)>) {
        let result = match &statement.kind {
            StatementKind::ScopeBegin => {
                if let Some(frame) = self.frames.last_mut() {
                    let ordinal = frame.scopes_seen;
                    frame.scopes_seen += 1;
                    self.scopes.push(Scope::new(ordinal, false, self.tops));
                }
                Ok(())
            }
            StatementKind::ScopeEnd => {
                self.close_scope();
                Ok(())
            }
            StatementKind::Label(name) => self.label(name).map(|label| self.place_label(label)),
            StatementKind::Registers(declaration) => match self.scopes.last_mut() {
                Some(scope) => scope.declare(declaration, &mut self.tops),
                None => Ok(()),
            },
            StatementKind::Variable(variable) => match variable.space {
                Some(Space::Local | Space::Parameter) => {
                    self.local_slot(variable.bytes() as u32, variable.alignment).map(|address| {
                        if let Some(scope) = self.scopes.last_mut() {
                            let binding = Binding::Variable {
                                space: Space::Local,
                                address: u64::from(address),
                                bytes: variable.bytes() as u32,
                            };
                            scope.bind(variable.name.clone(), binding);
                        }
                    })
                }
                _ => Ok(()),
            },
            StatementKind::BranchTargets { .. } | StatementKind::CallTable(_) => Ok(()),
            StatementKind::Instruction(line) => {
                self.line(statement.ptx_line, line, product);
                Ok(())
            }
        };
        if let Err(reason) = result {
            self.refuse(statement.ptx_line, format!("{:?}", statement.kind), "", reason);
        }
    }

    fn refuse(&mut self, ptx_line: u32, text: String, form: &str, reason: String) {
        // Ignore register numbers, which differ from line to line.
        let reason_kind = reason.replace(|letter: char| letter.is_ascii_digit(), "");
        let key = (form.to_string(), reason_kind);
        self.unknown.entry(key).and_modify(|known| known.occurrences += 1).or_insert(UnknownForm {
            ptx_line,
            text,
            reason,
            occurrences: 1,
        });
    }

    fn line(&mut self, ptx_line: u32, line: &'m Line, product: Option<(&'m Line, usize)>) {
        self.ptx_line = ptx_line;
        self.source = line.source;
        let tops = self.tops;
        let result = self.guarded(line, product);
        self.most = self.most.maximum(self.tops);
        // Slots of calls stay allocated; registers of the line are freed.
        self.tops = Tops { local_bytes: self.tops.local_bytes, ..tops };
        if let Err(reason) = result {
            self.refuse(ptx_line, line.to_string(), &line.opcode.text, reason);
        }
        self.guard = None;
    }

    fn guarded(
        &mut self,
        line: &'m Line,
        product: Option<(&'m Line, usize)>,
    ) -> Result<(), String> {
        self.guard = match &line.guard {
            None => None,
            Some(guard) => match self.find(&guard.register) {
                Some(Binding::Predicate(index)) => {
                    Some(PredicateSource::Register { index, negated: guard.negated })
                }
                _ => return Err(format!("guard `{}` is no predicate register", guard.register)),
            },
        };
        if &*line.opcode.words[0] == "call" {
            return self.call(line);
        }
        let mut instruction = self.instruction(line)?;
        if let (Some((product, operand)), Some(sum)) = (product, &instruction) {
            // A product whose operands are not visible here is not fused.
            if let Some(fused) = self.fuse(sum, product, operand) {
                instruction = Some(fused);
            }
        }
        if let Some(instruction) = instruction {
            self.emit(instruction);
        }
        Ok(())
    }

    fn resolve_labels(&mut self) {
        let end = self.steps.len() as u32 - 1;
        let positions = &self.label_positions;
        let position = |label: u32| positions[label as usize].unwrap_or(end);
        for step in &mut self.steps {
            match &mut step.instruction {
                Instruction::Branch { target, .. } => *target = position(*target),
                Instruction::BranchIndexed { targets, .. } => {
                    targets.iter_mut().for_each(|target| *target = position(*target));
                }
                _ => {}
            }
        }
    }
}

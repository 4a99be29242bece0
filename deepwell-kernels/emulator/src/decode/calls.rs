//! Decoding of calls: functions of the module are inlined, calls of runtime functions stay.

use super::layout::slot_bytes;
use super::lower::Lowering;
use super::operands::register_bits;
use super::scalar_instruction::ScalarInstruction;
use super::scope::Binding;
use super::types::{Address, Register, Scope, Semantics, Source, Space, Type};
use super::{ExternalCall, ExternalFunction, Instruction, Load, LocalSlot, Store};
use crate::ptx::{Instruction as Line, Operand, Variable};

const EXTERNAL: &[(&str, ExternalFunction)] = &[
    ("vprintf", ExternalFunction::Printf),
    ("__assertfail", ExternalFunction::AssertFail),
    ("malloc", ExternalFunction::Malloc),
    ("free", ExternalFunction::Free),
];

impl<'m> Lowering<'m> {
    /// Decodes `call {(results),} function {, (arguments)} {, prototype}`.
    pub(super) fn call(&mut self, line: &'m Line) -> Result<(), String> {
        let mut rest = line.operands.as_slice();
        let mut results: &'m [Operand] = &[];
        if let Some(Operand::Group(group)) = rest.first() {
            results = group;
            rest = &rest[1..];
        }
        let Some(Operand::Name(name)) = rest.first() else {
            return Err("no function is named".to_string());
        };
        let arguments: &'m [Operand] = match rest.get(1) {
            Some(Operand::Group(group)) => group,
            None => &[],
            Some(_) => return Err("arguments are expected in parentheses".to_string()),
        };
        let module = self.module;
        let Some(function) = module.function(name) else {
            return Err(format!("`{name}` is no function here; calls by pointer are not known"));
        };
        if function.parameters.len() != arguments.len() || function.returns.len() != results.len() {
            return Err(format!(
                "`{name}` takes {} values and gives {}, here are {} and {}",
                function.parameters.len(),
                function.returns.len(),
                arguments.len(),
                results.len()
            ));
        }
        // Local slots of arguments and results are freed after the call.
        let local_top = self.tops.local_bytes;
        let mut bindings = Vec::new();
        let mut after = Vec::new();
        for (formal, argument) in function.parameters.iter().zip(arguments) {
            bindings.push((formal.name.clone(), self.argument(formal, argument)?));
        }
        for (formal, result) in function.returns.iter().zip(results) {
            let (binding, instruction) = self.result(formal, result)?;
            bindings.push((formal.name.clone(), binding));
            after.extend(instruction);
        }
        let guard = self.guard();
        if function.body.is_none() {
            let external = EXTERNAL.iter().find(|row| row.0 == &**name).map(|row| row.1);
            let Some(external) = external else {
                return Err(format!("`{name}` has no body"));
            };
            let slots: Result<Vec<LocalSlot>, String> =
                bindings.iter().map(|(_, binding)| slot(*binding)).collect();
            let mut slots = slots?;
            let result = if results.is_empty() { None } else { slots.pop() };
            self.emit(Instruction::ExternalCall(ExternalCall {
                function: external,
                arguments: slots.into(),
                result,
            }));
        } else {
            self.may_enter(function)?;
            let skip = guard.map(|guard| {
                let skip = self.new_label();
                let jump = Instruction::Branch { target: skip, uniform: false };
                self.emit_guarded(Some(guard.negate()), jump);
                skip
            });
            self.inline(function, bindings);
            if let Some(skip) = skip {
                self.place_label(skip);
            }
        }
        for instruction in after {
            self.emit_guarded(guard, instruction);
        }
        self.tops.local_bytes = local_top;
        Ok(())
    }

    /// Binds a parameter of the callee, after moving the argument to its register or slot.
    fn argument(&mut self, formal: &Variable, argument: &Operand) -> Result<Binding, String> {
        if let Operand::Name(name) = argument
            && let Some(variable @ Binding::Variable { space: Space::Local, .. }) = self.find(name)
        {
            return Ok(variable);
        }
        let source = self.source(argument, formal.element)?;
        if formal.space.is_none() {
            let register = self.temporary(formal.element)?;
            self.emit(Instruction::Scalar(ScalarInstruction::Move {
                destination: register,
                source,
            }));
            return Ok(Binding::Value(register));
        }
        let (binding, address) = self.slot_of(formal)?;
        self.emit(Instruction::Store(Store {
            space: Space::Local,
            semantics: Semantics::Weak,
            scope: Scope::System,
            element: bits_type(formal.element),
            sources: Box::new([source]),
            address,
        }));
        Ok(binding)
    }

    /// Binds a result of the callee. Also returns the instruction, if one is needed, that moves the
    /// result to the caller's destination.
    fn result(
        &mut self,
        formal: &Variable,
        result: &Operand,
    ) -> Result<(Binding, Option<Instruction>), String> {
        if let Operand::Name(name) = result
            && let Some(variable @ Binding::Variable { space: Space::Local, .. }) = self.find(name)
        {
            return Ok((variable, None));
        }
        let destination: Register = self.destination(result, formal.element)?;
        if formal.space.is_none() {
            return Ok((Binding::Value(destination), None));
        }
        let (binding, address) = self.slot_of(formal)?;
        let load = Instruction::Load(Load {
            space: Space::Local,
            semantics: Semantics::Weak,
            scope: Scope::System,
            read_only: false,
            element: bits_type(formal.element),
            destinations: Box::new([Some(destination)]),
            address,
        });
        Ok((binding, Some(load)))
    }

    fn slot_of(&mut self, formal: &Variable) -> Result<(Binding, Address), String> {
        let bytes = slot_bytes(formal.element);
        let offset = self.local_slot(bytes, bytes)?;
        let binding = Binding::Variable { space: Space::Local, address: u64::from(offset), bytes };
        Ok((binding, Address { base: Source::Immediate(0), offset: i64::from(offset) }))
    }
}

fn bits_type(value_type: Type) -> Type {
    match register_bits(value_type) {
        16 if value_type.bits() <= 8 => Type::B8,
        16 => Type::B16,
        32 => Type::B32,
        _ => Type::B64,
    }
}

fn slot(binding: Binding) -> Result<LocalSlot, String> {
    match binding {
        Binding::Variable { space: Space::Local, address, bytes } => {
            Ok(LocalSlot { offset: address as u32, bytes })
        }
        _ => Err("arguments of the device's runtime have to be parameters".to_string()),
    }
}

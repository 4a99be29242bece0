//! Dispatch of lines to the decoders of instruction families.

use super::lower::Lowering;
use super::words::Words;
use super::{Instruction, scalar_forms};
use crate::ptx::Instruction as Line;

impl Lowering<'_> {
    /// Decodes a line that is not a call. Returns `None` if the emitted instructions are complete.
    pub(super) fn instruction(&mut self, line: &Line) -> Result<Option<Instruction>, String> {
        let mut words = Words::new(&line.opcode)?;
        let words = &mut words;
        let operands = line.operands.as_slice();
        let instruction = match &*line.opcode.words[0] {
            "mov" => return self.mov(words, operands),
            "add" | "sub" | "addc" | "subc" | "mul" | "mad" | "madc" | "fma" | "div" | "rem"
            | "min" | "max" | "abs" | "neg" => {
                self.arithmetic(&line.opcode.words[0], words, operands)?
            }
            "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "lg2" | "ex2" | "tanh" | "copysign"
            | "testp" => self.float_function(&line.opcode.words[0], words, operands)?,
            "and" | "or" | "xor" => self.logic(&line.opcode.words[0], words, operands)?,
            "not" => self.not(words, operands)?,
            "lop3" => self.logic3(words, operands)?,
            "bfi" => self.insert_bits(words, operands)?,
            "dp4a" | "dp2a" => self.dot_product(&line.opcode.words[0], words, operands)?,
            "setp" | "set" | "selp" | "slct" => {
                self.comparison(&line.opcode.words[0], words, operands)?
            }
            "cvt" => self.conversion(words, operands)?,
            "cvta" | "isspacep" | "mapa" | "getctarank" | "createpolicy" => {
                self.address_instruction(&line.opcode.words[0], words, operands)?
            }
            "ld" | "ldu" => self.load(words, operands)?,
            "st" => self.store(words, operands)?,
            "atom" | "red" => self.atomic(&line.opcode.words[0], words, operands)?,
            "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                self.cache_hint(&line.opcode.words[0], words, operands)?
            }
            "bra" | "brx" | "ret" | "exit" | "trap" | "brkpt" | "nanosleep" | "pmevent" => {
                self.control(&line.opcode.words[0], words, operands)?
            }
            "bar" | "barrier" => self.barrier(&line.opcode.words[0], words, operands)?,
            "membar" | "fence" => self.fence(&line.opcode.words[0], words, operands)?,
            "shfl" | "vote" | "match" | "activemask" | "elect" | "redux" => {
                self.warp_exchange(&line.opcode.words[0], words, operands)?
            }
            "setmaxnreg" | "griddepcontrol" | "clusterlaunchcontrol" => {
                self.launch_control(&line.opcode.words[0], words, operands)?
            }
            "mbarrier" => self.mbarrier(words, operands)?,
            "cp" => self.copy(words, operands)?,
            "tensormap" => self.tensor_map(words, operands)?,
            "ldmatrix" => self.load_matrix(words, operands)?,
            "stmatrix" => self.store_matrix(words, operands)?,
            "movmatrix" => self.move_matrix(words, operands)?,
            "mma" => self.warp_mma(words, operands)?,
            "wgmma" => self.warp_group(words, operands)?,
            "tcgen05" => self.tcgen05(words, operands)?,
            name => match scalar_forms::find(name) {
                Some(form) => self.scalar_form(form, words, operands)?,
                None => return Err("the instruction is not known".to_string()),
            },
        };
        words.finish()?;
        Ok(Some(instruction))
    }
}

//! Frames over MPI, from process to process, with calls that do not wait.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use mpi::ffi::{
    self, MPI_Comm, MPI_Message, MPI_Request, MPI_Status, RSMPI_COMM_WORLD, RSMPI_UINT8_T,
};
use mpi::topology::{Communicator, SimpleCommunicator};

use crate::comm::mailbox::{Outgoing, Transport, frame_bytes};

/// A frame goes in parts of so many bytes and a last one: MPI counts the bytes of a part in a C
/// integer.
const PART_BYTES: usize = 256 << 20;

/// All frames have this tag: whom they are for stands in them.
const TAG: c_int = 7;

/// Frames that go and come. The library may read the ones and write the others until it says that
/// it is done; where it has not when this is dropped, they are left where they are.
pub(super) struct MpiTransport {
    comm: MPI_Comm,
    own: u32,
    sending: Vec<Sending>,
    /// By rank.
    incoming: Vec<Incoming>,
}

/// A part of a frame that has not gone.
struct Sending {
    request: MPI_Request,
    /// Keeps the bytes where they are.
    _frame: Outgoing,
}

/// What has come of a frame.
#[derive(Default)]
struct Incoming {
    /// Its bytes so far; the capacity is that of the whole once the first part is there.
    frame: Vec<u8>,
    /// The next part, which comes into the capacity behind them, and how long it is.
    part: Option<(MPI_Request, usize)>,
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.sending));
        let busy = self.incoming.drain(..).filter(|incoming| incoming.part.is_some());
        busy.for_each(std::mem::forget);
    }
}

impl MpiTransport {
    /// # Errors
    /// What the library says.
    pub(super) fn new(world: &SimpleCommunicator) -> Result<MpiTransport, String> {
        // SAFETY: constants of the library, which has been initialized: there is a communicator.
        let (comm, set) = unsafe {
            let handler = ffi::RSMPI_ERRORS_RETURN;
            (RSMPI_COMM_WORLD, ffi::MPI_Comm_set_errhandler(RSMPI_COMM_WORLD, handler))
        };
        // Errors end the process otherwise.
        check("MPI_Comm_set_errhandler", set)?;
        let incoming = (0..world.size()).map(|_| Incoming::default()).collect();
        Ok(MpiTransport { comm, own: world.rank() as u32, sending: Vec::new(), incoming })
    }

    /// Takes a part from a rank, if one is there. Whether anything has moved.
    fn receive(&mut self, from: usize) -> Result<bool, String> {
        let comm = self.comm;
        let Incoming { frame, part } = &mut self.incoming[from];
        if let Some((request, bytes)) = part {
            if !is_done(request)? {
                return Ok(false);
            }
            // SAFETY: the library has written so many bytes behind those that were there, into
            // capacity that was reserved for them.
            unsafe { frame.set_len(frame.len() + *bytes) };
            *part = None;
            return Ok(true);
        }
        let Some((mut message, bytes)) = probe(comm, from)? else { return Ok(false) };
        frame.reserve_exact(bytes);
        let (target, count) = (frame.spare_capacity_mut().as_mut_ptr(), bytes as c_int);
        let mut request = MaybeUninit::uninit();
        // SAFETY: the target has room for so many bytes, and the vector neither moves them nor is
        // dropped before the request is done. The message has just been matched and is used once.
        let request = unsafe {
            let target = target.cast::<c_void>();
            let code =
                ffi::MPI_Imrecv(target, count, RSMPI_UINT8_T, &mut message, request.as_mut_ptr());
            check("MPI_Imrecv", code)?;
            request.assume_init()
        };
        *part = Some((request, bytes));
        Ok(true)
    }

    /// Makes room for the rest of a frame whose first part has come; gives one that is whole.
    fn whole(&mut self, from: usize) -> Result<Option<Vec<u8>>, String> {
        let Incoming { frame, part } = &mut self.incoming[from];
        if part.is_some() || frame.is_empty() {
            return Ok(None);
        }
        let bytes =
            frame_bytes(frame).map_err(|reason| format!("rank {from} has sent {reason}"))?;
        if bytes > frame.len() {
            frame.reserve_exact(bytes - frame.len());
            return Ok(None);
        }
        Ok(Some(std::mem::take(frame)))
    }
}

impl Transport for MpiTransport {
    fn post(&mut self, to: u32, frame: Outgoing) -> Result<(), String> {
        for part in frame.chunks(PART_BYTES) {
            let mut request = MaybeUninit::uninit();
            // SAFETY: the bytes are a shared vector's, which nobody changes and which is kept
            // until the request is done.
            let request = unsafe {
                let (source, count) = (part.as_ptr().cast(), part.len() as c_int);
                let code = ffi::MPI_Isend(
                    source,
                    count,
                    RSMPI_UINT8_T,
                    to as c_int,
                    TAG,
                    self.comm,
                    request.as_mut_ptr(),
                );
                check("MPI_Isend", code)?;
                request.assume_init()
            };
            self.sending.push(Sending { request, _frame: Outgoing::clone(&frame) });
        }
        Ok(())
    }

    fn poll(&mut self, arrived: &mut Vec<(u32, Vec<u8>)>) -> Result<bool, String> {
        let before = self.sending.len();
        let mut index = 0;
        while index < self.sending.len() {
            if is_done(&mut self.sending[index].request)? {
                self.sending.swap_remove(index);
            } else {
                index += 1;
            }
        }
        let mut has_moved = self.sending.len() < before;
        let own = self.own as usize;
        for from in (0..self.incoming.len()).filter(|&from| from != own) {
            while self.receive(from)? {
                has_moved = true;
                if let Some(frame) = self.whole(from)? {
                    arrived.push((from as u32, frame));
                }
            }
        }
        Ok(has_moved)
    }

    fn is_sent(&self) -> bool {
        self.sending.is_empty()
    }
}

/// Whether the library is done with a request, which is no more then.
fn is_done(request: &mut MPI_Request) -> Result<bool, String> {
    let mut flag: c_int = 0;
    // SAFETY: the request is one that the library has made and not yet said to be done.
    let code = unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
    check("MPI_Test", code)?;
    Ok(flag != 0)
}

/// A part that a rank has sent, and its bytes.
fn probe(comm: MPI_Comm, from: usize) -> Result<Option<(MPI_Message, usize)>, String> {
    let (mut flag, mut count): (c_int, c_int) = (0, 0);
    let mut message = MaybeUninit::<MPI_Message>::uninit();
    let mut status = MaybeUninit::<MPI_Status>::uninit();
    // SAFETY: the places are for what the call writes; message and status are read where the flag
    // says that they have been written.
    unsafe {
        let code = ffi::MPI_Improbe(
            from as c_int,
            TAG,
            comm,
            &mut flag,
            message.as_mut_ptr(),
            status.as_mut_ptr(),
        );
        check("MPI_Improbe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        check("MPI_Get_count", ffi::MPI_Get_count(status.as_ptr(), RSMPI_UINT8_T, &mut count))?;
        Ok(Some((message.assume_init(), count as usize)))
    }
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code as u32 == ffi::MPI_SUCCESS {
        return Ok(());
    }
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the text has as many bytes as the library may write.
    unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), ptr::from_mut(&mut length))
    };
    text.truncate(length as usize);
    Err(format!("{call}: {}", String::from_utf8_lossy(&text)))
}

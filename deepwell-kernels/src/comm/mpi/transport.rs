//! Frames over MPI, with non-blocking calls.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use mpi::ffi::{
    self, MPI_Comm, MPI_Message, MPI_Request, MPI_Status, RSMPI_COMM_WORLD, RSMPI_UINT8_T,
};
use mpi::topology::{Communicator, SimpleCommunicator};

use crate::comm::mailbox::{Outgoing, Transport, frame_bytes};

/// Frames are sent in parts of at most this size: MPI counts the bytes of a part in a C integer.
const PART_BYTES: usize = 256 << 20;

/// The tag of all frames: the receiver dispatches on the frame's header.
const TAG: c_int = 7;

/// Outgoing and incoming frames. The library may read outgoing and write incoming buffers until the
/// requests complete; on drop, buffers with incomplete requests are leaked.
pub(super) struct MpiTransport {
    comm: MPI_Comm,
    own: u32,
    sending: Vec<Sending>,
    /// By rank.
    incoming: Vec<Incoming>,
}

/// A part of a frame in flight.
struct Sending {
    request: MPI_Request,
    /// Keeps the bytes alive and in place.
    _frame: Outgoing,
}

/// An incomplete incoming frame.
#[derive(Default)]
struct Incoming {
    /// Bytes received so far; the capacity is the length of the whole frame once the first part is
    /// complete.
    frame: Vec<u8>,
    /// The next part, received into the spare capacity, and its length.
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
    /// An error of the library.
    pub(super) fn new(world: &SimpleCommunicator) -> Result<MpiTransport, String> {
        // SAFETY: constants of the library; after initialization the world communicator exists.
        let (comm, set) = unsafe {
            let handler = ffi::RSMPI_ERRORS_RETURN;
            (RSMPI_COMM_WORLD, ffi::MPI_Comm_set_errhandler(RSMPI_COMM_WORLD, handler))
        };
        // By default, errors end the process.
        check("MPI_Comm_set_errhandler", set)?;
        let incoming = (0..world.size()).map(|_| Incoming::default()).collect();
        Ok(MpiTransport { comm, own: world.rank() as u32, sending: Vec::new(), incoming })
    }

    /// Receives a part from a rank, if available. Returns whether any data has moved.
    fn receive(&mut self, from: usize) -> Result<bool, String> {
        let comm = self.comm;
        let Incoming { frame, part } = &mut self.incoming[from];
        if let Some((request, bytes)) = part {
            if !is_done(request)? {
                return Ok(false);
            }
            // SAFETY: the library has written `bytes` bytes after the initialized bytes, into
            // capacity that was reserved for the part.
            unsafe { frame.set_len(frame.len() + *bytes) };
            *part = None;
            return Ok(true);
        }
        let Some((mut message, bytes)) = probe(comm, from)? else { return Ok(false) };
        frame.reserve_exact(bytes);
        let target = frame.spare_capacity_mut().as_mut_ptr();
        let count = bytes as c_int;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the target has room for `bytes` bytes, and the vector neither reallocates nor is
        // dropped before the request completes. The message has just been matched and is used once.
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

    /// Reserves room for the rest of a frame whose first part is complete; returns a complete
    /// frame.
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
            // SAFETY: the bytes belong to a shared vector, which is never changed and is kept alive
            // until the request completes.
            let request = unsafe {
                let source = part.as_ptr().cast();
                let count = part.len() as c_int;
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

/// Whether a request is complete; MPI frees a complete request.
fn is_done(request: &mut MPI_Request) -> Result<bool, String> {
    let mut flag: c_int = 0;
    // SAFETY: the library made the request, and the request has not been reported complete before.
    let code = unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
    check("MPI_Test", code)?;
    Ok(flag != 0)
}

/// Matches a part sent by a rank, and returns its length.
fn probe(comm: MPI_Comm, from: usize) -> Result<Option<(MPI_Message, usize)>, String> {
    let (mut flag, mut count): (c_int, c_int) = (0, 0);
    let mut message = MaybeUninit::<MPI_Message>::uninit();
    let mut status = MaybeUninit::<MPI_Status>::uninit();
    // SAFETY: the pointers are valid for the call's results; message and status are read only if
    // the flag says that both were written.
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

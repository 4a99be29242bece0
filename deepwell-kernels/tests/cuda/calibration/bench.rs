//! One device that runs kernels given as PTX text.

use deepwell_kernels::cuda::{
    Architecture, Argument, DeviceProperties, DevicePtr, Driver, DriverError, Launch, Priority,
    Stream,
};
use deepwell_trials::{note, skip};

use crate::device::open_driver_or_emulated;

/// What every kernel here is compiled for.
pub(super) const HEAD: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";
/// Names a folder that every kernel's text is written to, to be assembled or looked at.
const PTX_VARIABLE: &str = "DEEPWELL_CALIBRATION_PTX";
/// What outputs hold before.
const POISON: u8 = 0xA5;
/// Names the launches to run, by how their names begin: one that stops a GPU stops all that come
/// after it in the same process.
pub(super) const ONLY_VARIABLE: &str = "DEEPWELL_CALIBRATION_ONLY";

/// A device of compute capability 9.0, real or emulated.
pub(super) struct Bench {
    driver: Box<dyn Driver>,
    stream: Stream,
    /// What the next kernel is for: a launch that fails says it.
    purpose: String,
}

impl Bench {
    /// The GPU, or the emulated one where there is none; where there is neither, or another
    /// machine, the test is skipped.
    pub(super) fn open() -> Bench {
        let mut driver = open_driver_or_emulated(Architecture::Sm90a);
        if driver.properties().capability != (9, 0) {
            skip("calibration is for compute capability 9.0");
        }
        let stream = driver.stream(Priority::Middle).unwrap();
        Bench { driver, stream, purpose: String::new() }
    }

    /// Names the next launch, before it can stop the device; whether it is to run.
    pub(super) fn announce(&mut self, purpose: String) -> bool {
        if std::env::var(ONLY_VARIABLE).is_ok_and(|only| !purpose.starts_with(&only)) {
            return false;
        }
        note(|| purpose.clone());
        self.purpose = purpose;
        true
    }

    pub(super) fn driver(&mut self) -> &mut dyn Driver {
        self.driver.as_mut()
    }

    pub(super) fn properties(&self) -> DeviceProperties {
        self.driver.properties().clone()
    }

    pub(super) fn upload(&mut self, bytes: &[u8]) -> DevicePtr {
        let pointer = self.driver.allocate(bytes.len()).unwrap();
        self.driver.upload(pointer, bytes).unwrap();
        pointer
    }

    /// Memory that a kernel will write.
    pub(super) fn output(&mut self, bytes: usize) -> DevicePtr {
        self.upload(&vec![POISON; bytes])
    }

    /// Runs the kernel `run` of a module of [`HEAD`] and `ptx`, and gives `bytes` of `output`.
    pub(super) fn run(
        &mut self,
        ptx: &str,
        launch: (usize, u32),
        arguments: Vec<Argument>,
        (output, bytes): (DevicePtr, usize),
    ) -> Vec<u8> {
        self.launch(ptx, launch, arguments).unwrap_or_else(|error| {
            panic!("{}: {error}\n{ptx}", self.purpose);
        });
        let mut got = vec![0; bytes];
        self.driver.download(&mut got, output).unwrap();
        got
    }

    /// Launches the kernel, and gives the error that it ends with.
    pub(super) fn launch(
        &mut self,
        ptx: &str,
        (grid, threads): (usize, u32),
        arguments: Vec<Argument>,
    ) -> Result<(), DriverError> {
        let text = format!("{HEAD}{ptx}\0");
        if let Some(folder) = std::env::var_os(PTX_VARIABLE) {
            let name = format!("{}.ptx", &blake3::hash(text.as_bytes()).to_hex()[..16]);
            let text = text.trim_end_matches('\0');
            std::fs::write(std::path::PathBuf::from(folder).join(name), text).unwrap();
        }
        let module = self.driver.load_module(text.as_bytes());
        let module = module.unwrap_or_else(|error| panic!("{error}\n{ptx}"));
        let launch = Launch {
            function: self.driver.function(module, "run", 0).unwrap(),
            grid: [grid as u32, 1, 1],
            block: [threads, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: 0,
            programmatic: false,
            arguments,
        };
        self.driver.launch(&launch, self.stream)?;
        self.driver.synchronize()
    }
}

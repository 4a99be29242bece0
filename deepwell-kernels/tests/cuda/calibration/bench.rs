//! One device that runs kernels given as PTX text.

use deepwell_kernels::cuda::{Argument, DeviceProperties, DevicePtr, Driver, Launch, Stream};

use crate::harness::open_any_driver;

/// What every kernel here is compiled for.
pub(super) const HEAD: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";
/// Names a folder that every kernel's text is written to, to be assembled or looked at.
const PTX_VARIABLE: &str = "DEEPWELL_CALIBRATION_PTX";
/// What outputs hold before.
const POISON: u8 = 0xA5;

/// A device of compute capability 9.0, real or emulated.
pub(super) struct Bench {
    driver: Box<dyn Driver>,
    stream: Stream,
    /// What the next kernel is for: a launch that fails says it.
    purpose: String,
}

impl Bench {
    /// `None`, and a line on stderr, where there is no such device.
    pub(super) fn open() -> Option<Bench> {
        let mut driver = open_any_driver()?;
        if driver.properties().capability != (9, 0) {
            eprintln!("skipped: calibration is for compute capability 9.0");
            return None;
        }
        let stream = driver.stream(false).unwrap();
        Some(Bench { driver, stream, purpose: String::new() })
    }

    pub(super) fn name_purpose(&mut self, purpose: String) {
        self.purpose = purpose;
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
        (grid, threads): (usize, u32),
        arguments: Vec<Argument>,
        (output, bytes): (DevicePtr, usize),
    ) -> Vec<u8> {
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
        let launched = self.driver.launch(&launch, self.stream);
        launched.and_then(|()| self.driver.synchronize()).unwrap_or_else(|error| {
            panic!("{}: {error}\n{ptx}", self.purpose);
        });
        let mut got = vec![0; bytes];
        self.driver.download(&mut got, output).unwrap();
        got
    }
}

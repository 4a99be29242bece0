//! Rank of this process, from the launcher's environment.

use crate::TrainError;

/// Default port of torchrun.
const MASTER_PORT: u16 = 29_500;

/// A process started by a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Name of the launcher.
    pub launcher: &'static str,
    /// Rank of the process, counted from 0.
    pub rank: u32,
    /// Index among the ranks of the same machine.
    pub local_rank: usize,
    /// Number of ranks.
    pub world_size: u32,
    /// The machine of rank 0.
    pub address: String,
    /// Port of rank 0: one above `MASTER_PORT`, which the launcher may use itself.
    pub port: u16,
    /// Number of restarts by the launcher.
    pub attempt: u32,
}

/// The environment variables of a launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    local_rank: &'static str,
    world_size: &'static str,
    local_world_size: Option<&'static str>,
    attempt: Option<&'static str>,
    /// The machines of the ranks, in order.
    nodes: Option<&'static str>,
}

/// In the order of detection: within a job of Slurm, mpirun may start the ranks.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        local_rank: "LOCAL_RANK",
        world_size: "WORLD_SIZE",
        local_world_size: Some("LOCAL_WORLD_SIZE"),
        attempt: Some("TORCHELASTIC_RESTART_COUNT"),
        nodes: None,
    },
    Launcher {
        name: "mpirun of Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_world_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        attempt: None,
        nodes: None,
    },
    Launcher {
        name: "mpirun of MPICH",
        rank: "PMI_RANK",
        local_rank: "MPI_LOCALRANKID",
        world_size: "PMI_SIZE",
        local_world_size: Some("MPI_LOCALNRANKS"),
        attempt: None,
        nodes: None,
    },
    Launcher {
        name: "srun",
        rank: "SLURM_PROCID",
        local_rank: "SLURM_LOCALID",
        world_size: "SLURM_NTASKS",
        local_world_size: None,
        attempt: Some("SLURM_RESTART_COUNT"),
        nodes: Some("SLURM_STEP_NODELIST"),
    },
];

impl Launched {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// [`TrainError::Setting`] names the missing or invalid variable.
    pub fn from_environment() -> Result<Launched, TrainError> {
        Launched::of(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Checks that no launcher has started this process as one of several without `--launched`.
    ///
    /// Slurm's variables are ignored: they also exist in a script that runs once for all ranks.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the option to add.
    pub fn expect_none() -> Result<(), TrainError> {
        Launched::expect_none_of(&|name| std::env::var(name).ok().filter(|it| !it.is_empty()))
    }

    fn expect_none_of(variable: &dyn Fn(&str) -> Option<String>) -> Result<(), TrainError> {
        let several = |launcher: &&Launcher| {
            let world_size = variable(launcher.world_size).and_then(|it| it.parse::<u32>().ok());
            variable(launcher.rank).is_some() && world_size.is_some_and(|size| size > 1)
        };
        let is_trusted = |launcher: &&Launcher| launcher.nodes.is_none();
        let Some(launcher) = LAUNCHERS.iter().filter(is_trusted).find(several) else {
            return Ok(());
        };
        let [rank, size] =
            [launcher.rank, launcher.world_size].map(|name| variable(name).unwrap_or_default());
        Err(TrainError::Setting {
            setting: "launched",
            expected: format!(
                "`--launched` on a rank of {}, which has set {} and {}",
                launcher.name, launcher.rank, launcher.world_size
            ),
            got: format!("rank {rank} of {size} without it"),
            hint: Some(
                "without it every rank would train a model of its own into one folder; to do that, \
                 unset the variables and give each an `--out`"
                    .to_string(),
            ),
        })
    }

    fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Launched, TrainError> {
        let started_by = LAUNCHERS.iter().find(|launcher| variable(launcher.rank).is_some());
        let Some(launcher) = started_by else { return Err(no_launcher()) };
        let number = |name: &'static str| -> Result<u32, TrainError> {
            let value = variable(name);
            value.as_deref().and_then(|value| value.parse().ok()).ok_or_else(|| {
                TrainError::Setting {
                    setting: name,
                    expected: format!("a number, as {} sets it", launcher.name),
                    got: value.map_or("nothing".to_string(), |value| format!("`{value}`")),
                    hint: Some(format!(
                        "`{}` is set: was this process started by {}?",
                        launcher.rank, launcher.name
                    )),
                }
            })
        };
        let optional = |name: Option<&'static str>| match name {
            Some(name) if variable(name).is_some() => number(name).map(Some),
            _ => Ok(None),
        };
        let rank = number(launcher.rank)?;
        let world_size = number(launcher.world_size)?;
        if rank >= world_size {
            return Err(TrainError::Setting {
                setting: launcher.rank,
                expected: format!("a number below {} {world_size}", launcher.world_size),
                got: rank.to_string(),
                hint: None,
            });
        }
        let is_one_machine = optional(launcher.local_world_size)? == Some(world_size);
        let first_node = launcher.nodes.and_then(variable).map(|nodes| first_of(&nodes));
        let address = variable("MASTER_ADDR")
            .or_else(|| is_one_machine.then(|| "127.0.0.1".to_string()))
            .or(first_node)
            .ok_or_else(|| TrainError::Setting {
                setting: "MASTER_ADDR",
                expected: "the machine of rank 0".to_string(),
                got: "nothing".to_string(),
                hint: Some(format!(
                    "{} does not set it where ranks are on several machines: give it to all of \
                     them, `mpirun -x MASTER_ADDR=node1`",
                    launcher.name
                )),
            })?;
        Ok(Launched {
            launcher: launcher.name,
            rank,
            local_rank: number(launcher.local_rank)? as usize,
            world_size,
            address,
            port: port(variable("MASTER_PORT"))?,
            attempt: optional(launcher.attempt)?.unwrap_or(0),
        })
    }

    /// Whether torchrun has started this process: it brings no MPI.
    pub fn is_by_torchrun(&self) -> bool {
        self.launcher == LAUNCHERS[0].name
    }

    /// Whether this is the rank that prints for all.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }
}

fn no_launcher() -> TrainError {
    let names = LAUNCHERS.map(|launcher| format!("`{}` ({})", launcher.rank, launcher.name));
    TrainError::Setting {
        setting: "launched",
        expected: format!("a launcher that sets {}", names.join(", ")),
        got: "none of them".to_string(),
        hint: Some(
            "`torchrun --no-python --nproc-per-node 2 deepwell train --launched`; on one machine \
             `deepwell train --devices cuda:0,cuda:1` needs no launcher"
                .to_string(),
        ),
    }
}

/// Port of rank 0.
fn port(named: Option<String>) -> Result<u16, TrainError> {
    let master = match &named {
        None => Some(MASTER_PORT),
        Some(named) => named.parse().ok(),
    };
    master.and_then(|port| port.checked_add(1)).ok_or_else(|| TrainError::Setting {
        setting: "MASTER_PORT",
        expected: "a port from 0 to 65534: the ranks find each other at the next one".to_string(),
        got: format!("`{}`", named.unwrap_or_default()),
        hint: None,
    })
}

/// The first machine of Slurm's list, `a1` of `a[1-3,7],b2`.
fn first_of(nodes: &str) -> String {
    let Some((prefix, rest)) = nodes.split_once('[').filter(|(prefix, _)| !prefix.contains(','))
    else {
        return nodes.split(',').next().unwrap_or_default().to_string();
    };
    let (numbers, behind) = rest.split_once(']').unwrap_or((rest, ""));
    let number = numbers.split(['-', ',']).next().unwrap_or_default();
    let suffix = behind.split(',').next().unwrap_or_default();
    format!("{prefix}{number}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `RANK=1 WORLD_SIZE=2` as the environment.
    fn read(environment: &str) -> Result<Launched, TrainError> {
        let variables: Vec<(&str, &str)> =
            environment.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
        Launched::of(&|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.to_string()).filter(|value| !value.is_empty())
        })
    }

    #[test]
    fn what_launchers_say() {
        let check = |environment: &str, launcher: &str, numbers: [u32; 4], place: &str| {
            let got = read(environment).unwrap();
            let [rank, local_rank, world_size, attempt] = numbers;
            assert_eq!(got.launcher, launcher, "{environment}");
            assert_eq!((got.rank, got.local_rank as u32), (rank, local_rank), "{environment}");
            assert_eq!((got.world_size, got.attempt), (world_size, attempt), "{environment}");
            assert_eq!(format!("{}:{}", got.address, got.port), place, "{environment}");
        };
        let torchrun = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 \
                        MASTER_PORT=29400 TORCHELASTIC_RESTART_COUNT=2";
        check(torchrun, "torchrun", [3, 1, 4, 2], "node1:29401");
        // Within a job of Slurm.
        let both = format!("{torchrun} SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0");
        check(&both, "torchrun", [3, 1, 4, 2], "node1:29401");
        let ompi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=2 \
                    OMPI_COMM_WORLD_LOCAL_SIZE=2";
        check(ompi, "mpirun of Open MPI", [1, 1, 2, 0], "127.0.0.1:29501");
        let named = format!("{ompi} MASTER_ADDR=10.0.0.7 MASTER_PORT=1234");
        check(&named, "mpirun of Open MPI", [1, 1, 2, 0], "10.0.0.7:1235");
        let mpich = "PMI_RANK=0 MPI_LOCALRANKID=0 PMI_SIZE=2 MPI_LOCALNRANKS=2";
        check(mpich, "mpirun of MPICH", [0, 0, 2, 0], "127.0.0.1:29501");
        let srun = "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8 SLURM_RESTART_COUNT=1";
        for (nodes, first) in [
            ("gpu7", "gpu7"),
            ("gpu7,gpu9", "gpu7"),
            ("gpu[01-04,07]", "gpu01"),
            ("gpu[3,5]-ib,cpu1", "gpu3-ib"),
            ("login,gpu[1-2]", "login"),
        ] {
            let environment = format!("{srun} SLURM_STEP_NODELIST={nodes}");
            check(&environment, "srun", [5, 1, 8, 1], &format!("{first}:29501"));
        }
    }

    #[test]
    fn launchers_that_nobody_spoke_of() {
        let check = |environment: &str, expected: Option<&str>| {
            let variables: Vec<(&str, &str)> =
                environment.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
            let got = Launched::expect_none_of(&|name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| value.to_string())
            });
            let got = got.err().map(|error| error.to_string());
            let is_expected = match (&got, expected) {
                (Some(got), Some(expected)) => got.contains(expected),
                (got, expected) => got.is_none() && expected.is_none(),
            };
            assert!(is_expected, "{environment}: {got:?}");
        };
        check("", None);
        check("RANK=0", None);
        check("WORLD_SIZE=2", None);
        check("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", None);
        check("RANK=1 WORLD_SIZE=2", Some("got rank 1 of 2 without it"));
        check("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4", Some("mpirun of Open MPI, which"));
        check("PMI_RANK=3 PMI_SIZE=4", Some("rank 3 of 4"));
        // A batch script of Slurm, and its first rank.
        check("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", None);
    }

    #[test]
    fn environments_that_cannot_be() {
        let check = |environment: &str, expected: &str| {
            let error = read(environment).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{environment}: {error}");
        };
        let none = "launched: expected a launcher that sets `RANK` (torchrun), \
                    `OMPI_COMM_WORLD_RANK` (mpirun of Open MPI), `PMI_RANK` (mpirun of MPICH), \
                    `SLURM_PROCID` (srun), got none of them\nhint: `torchrun";
        check("", none);
        check("WORLD_SIZE=2 LOCAL_RANK=0", none);
        check("RANK=0", "WORLD_SIZE: expected a number, as torchrun sets it, got nothing\nhint:");
        check("RANK=x WORLD_SIZE=2", "RANK: expected a number, as torchrun sets it, got `x`");
        check("RANK=-1 WORLD_SIZE=2", "RANK: expected a number, as torchrun sets it, got `-1`");
        check("RANK=2 WORLD_SIZE=2", "RANK: expected a number below WORLD_SIZE 2, got 2");
        check("RANK=0 WORLD_SIZE=0", "RANK: expected a number below WORLD_SIZE 0, got 0");
        let rank_variables = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a";
        check("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "LOCAL_RANK: expected a number");
        check(
            &format!("{rank_variables} MASTER_PORT=65535"),
            "MASTER_PORT: expected a port from 0 to 6553",
        );
        check(&format!("{rank_variables} MASTER_PORT=http"), "MASTER_PORT: expected a port");
        check(
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_SIZE=4 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "MASTER_ADDR: expected the machine of rank 0, got nothing\nhint: mpirun of Open MPI",
        );
        check("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "MASTER_ADDR: expected the machine of rank 0");
        check("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0", "MASTER_ADDR: expected");
    }
}

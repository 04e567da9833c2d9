//! Looking at the host. Nothing is changed, made or loaded, except NVML and, if a measurement of
//! partitions is asked for, a daemon of MPS.

mod command;
mod driver;
mod elf;
mod engine;
mod linker;
mod mps;
mod partitions;
mod processes;
mod system;

pub(super) use partitions::partitions;

use super::facts::Facts;
use linker::Linker;
use shadowslice_config::Config;

pub(super) fn facts(config: Option<&Config>) -> Facts {
    let linker = Linker::of_this_host();
    let processes = processes::all();
    Facts {
        driver: driver::facts(&linker, &processes),
        mps: mps::facts(&processes),
        system: system::facts(config),
        engine: engine::facts(config, &linker),
        partitions: None,
    }
}

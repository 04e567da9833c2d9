//! Collects facts about the host. Nothing is changed. Only a measurement of partitions starts
//! processes, among them an MPS daemon. This process loads NVML; a worker process loads the other
//! libraries, as a vendor's library may run code when it is loaded.

mod command;
mod driver;
mod engine;
mod mps;
mod partitions;
mod processes;
mod system;

pub(super) use partitions::partitions;

use super::facts::HostFacts;
use shadowslice_config::Config;

pub(super) fn facts(config: Option<&Config>) -> HostFacts {
    let processes = processes::all();
    let system = system::facts(config);
    HostFacts {
        driver: driver::facts(&processes),
        mps: mps::facts(&processes),
        engine: engine::facts(config, &system.worker),
        system,
        partitions: None,
    }
}

//! Collects facts about the host without changing it. Only the measurement of partitions starts an
//! MPS daemon. This process loads NVML. A worker process loads the other libraries, because a
//! vendor's library may run code when it is loaded.

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

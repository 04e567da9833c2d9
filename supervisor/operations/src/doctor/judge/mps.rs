//! Checks CUDA MPS.

use crate::doctor::check::Check;
use crate::doctor::facts::{DriverFacts, MpsFacts, MpsKind, MpsProcess, SystemFacts};
use shadowslice_control::nvml::ComputeMode;

pub(super) fn checks(mps: &MpsFacts, driver: &DriverFacts, system: &SystemFacts) -> Vec<Check> {
    let mut checks = vec![program(mps), daemons(mps, driver, system)];
    checks.extend(mps.pipes.iter().filter(|pipes| !pipes.alive).map(|pipes| {
        let path = pipes.path.display();
        Check::warning(
            "mps pipes",
            format!("{path} is left over from a dead daemon"),
            format!("remove it (`rm -r {path}`): every CUDA program looks for a daemon there"),
        )
    }));
    checks
}

fn program(mps: &MpsFacts) -> Check {
    let name = "mps";
    let Some(control) = &mps.control else {
        return Check::fault(
            name,
            "nvidia-cuda-mps-control is not in the PATH",
            "install it with the driver; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        );
    };
    let path = control.path.display();
    if !mps.server {
        return Check::fault(
            name,
            format!("nvidia-cuda-mps-server is not in the same folder as {path}"),
            "install both programs with the driver",
        );
    }
    match &control.version {
        Ok(version) => Check::ok(name, format!("version {version} at {path}")),
        Err(output) => Check::warning(
            name,
            format!("`{path} -v` printed no version: {}", output.trim()),
            "run the program manually; its version may not match the driver",
        ),
    }
}

fn daemons(mps: &MpsFacts, driver: &DriverFacts, system: &SystemFacts) -> Check {
    let name = "mps daemons";
    if mps.foreign.is_empty() {
        return Check::ok(name, "no foreign daemons");
    }
    let foreign: Vec<_> = mps.foreign.iter().map(|process| description(process, system.uid)).collect();
    let finding = format!("foreign MPS processes run: {}", foreign.join(", "));
    let serves = mps.foreign.iter().any(|process| process.kind == MpsKind::Server);
    let gpus = driver.nvml.iter().flat_map(|host| host.gpus.iter().flatten());
    let exclusive = gpus.filter(|gpu| gpu.compute_mode == ComputeMode::ExclusiveProcess).count() > 0;
    let advice =
        "stop them if they are unused (`echo quit | CUDA_MPS_PIPE_DIRECTORY=... nvidia-cuda-mps-control`)";
    if serves && exclusive {
        let advice = format!("a GPU in EXCLUSIVE_PROCESS mode accepts only one server; {advice}");
        return Check::fault(name, finding, advice);
    }
    let advice = format!("their clients take SMs and memory outside of all shares; {advice}");
    Check::warning(name, finding, advice)
}

fn description(process: &MpsProcess, own: u32) -> String {
    let kind = match process.kind {
        MpsKind::Control => "daemon",
        MpsKind::Server => "server",
    };
    let user = if process.uid == own { String::new() } else { format!(" of uid {}", process.uid) };
    let pipes = process.pipes.as_ref().map(|pipes| format!(" in {pipes}")).unwrap_or_default();
    format!("{kind} {}{user}{pipes}", process.pid)
}

//! Formats the GPUs: their models by SMs, their memory by kind, and their power.

use super::snapshot::{TopModel, TopSnapshot};
use crate::figures;
use crate::status::table::{block, cut};
use crate::status::{GpuStatus, notes_of_gpu};
use shadowslice_control::backend::BackendKind;
use shadowslice_shared::groups::Groups;

/// The screen width, in columns, at which the single line of a GPU has room for several letters per
/// group.
const WIDE: usize = 130;

/// Returns the complete description of one GPU, in several lines.
pub(super) fn full(snapshot: &TopSnapshot, gpu: &GpuStatus, width: usize) -> Vec<String> {
    let name = gpu.nvml.as_ref().map_or(gpu.device.as_str(), |nvml| nvml.name.as_str());
    let backend =
        if gpu.backend == BackendKind::Emulated { String::new() } else { format!(" {},", gpu.backend) };
    let mut head = format!("GPU {}  {name},{backend} {} SMs", gpu.index, gpu.sms);
    if let Some(power) = power(gpu) {
        head.push_str(&format!("; {power}"));
    }
    let mut lines = vec![cut(&head, width)];
    let room = width.saturating_sub(9);
    let (in_groups, by_percentage): (Vec<_>, Vec<_>) =
        snapshot.on(gpu.index).partition(|model| groups_of(model).is_some());
    if let Some(sizes) = gpu.groups.as_ref().filter(|_| !in_groups.is_empty()) {
        lines.push(format!("  SMs    {}", map(&in_groups, sizes.len(), room)));
    }
    if !by_percentage.is_empty() {
        lines.push(format!("  shares {}", bar(&by_percentage, room)));
    }
    lines.extend(block(&memory(snapshot, gpu), width));
    lines.extend(notes_of_gpu(gpu).iter().flat_map(|note| block(note, width)));
    lines
}

/// Returns a description of one GPU in a single line.
pub(super) fn short(snapshot: &TopSnapshot, gpu: &GpuStatus, width: usize) -> String {
    let models: Vec<_> = snapshot.on(gpu.index).collect();
    let grouped = models.iter().all(|model| groups_of(model).is_some());
    let groups = gpu.groups.as_ref().map_or(0, Vec::len);
    let who = match &gpu.groups {
        Some(_) if grouped => map(&models, groups, if width < WIDE { groups } else { groups * 4 }),
        _ => bar(&models, 21),
    };
    let closed = if gpu.why.is_some() { ", accepts no workers" } else { "" };
    let power = power(gpu).map(|power| format!("  {power}")).unwrap_or_default();
    let memory = gpu.nvml.as_ref().and_then(|nvml| nvml.memory);
    let memory = memory.map(|memory| {
        format!("  {} of {} used", figures::mib(memory.used_mib), figures::mib(memory.total_mib))
    });
    cut(&format!("GPU {} {}{closed}{power}{}", gpu.index, who.trim_end(), memory.unwrap_or_default()), width)
}

fn groups_of(model: &TopModel) -> Option<Groups> {
    model.status.groups.as_ref()?.parse().ok()
}

/// Draws a cell for each group with the letters of its models. If a group has no models, the cell
/// is `.`. If the letters do not fit, the cell shows the number of models.
fn map(models: &[&TopModel], groups: usize, room: usize) -> String {
    let width = (room / groups.max(1)).clamp(1, 6);
    let has = |group: usize| {
        let has = |model: &&&TopModel| groups_of(model).is_some_and(|groups| groups.contains(group));
        models.iter().filter(has).map(|model| model.key).collect::<String>()
    };
    (0..groups).map(|group| format!("{:<width$}", cell(&has(group), width))).collect()
}

/// Returns the text of a cell. If a cell has at least two columns, the last column stays empty.
fn cell(letters: &str, width: usize) -> String {
    let room = width.saturating_sub(1).max(1);
    match letters.len() {
        0 => ".".to_owned(),
        count if count <= room => letters.to_owned(),
        count if room > 1 && count > 9 => format!("{}+", cut_letters(letters, room - 1)),
        count if room > 2 => format!("{}+{}", cut_letters(letters, room - 2), count - (room - 2)),
        count => char::from_digit(u32::try_from(count).unwrap_or(10), 10).unwrap_or('+').to_string(),
    }
}

fn cut_letters(letters: &str, count: usize) -> String {
    letters.chars().take(count).collect()
}

/// Draws the shares next to each other. The length of the bar represents the whole GPU, or the sum
/// of the shares if this sum is larger.
fn bar(models: &[&TopModel], room: usize) -> String {
    let sum: u32 = models.iter().map(|model| model.status.share_percent).sum();
    let text = if sum > 0 { format!(" {sum}%") } else { " no share".to_owned() };
    let room = room.saturating_sub(text.len()).min(50);
    let cells = |percent: u32| (percent as usize * room).div_ceil(sum.max(100) as usize);
    let letters: String =
        models.iter().map(|model| model.key.to_string().repeat(cells(model.status.share_percent))).collect();
    let letters = letters.chars().take(room);
    format!("{}{text}", letters.chain(std::iter::repeat('.')).take(room).collect::<String>())
}

fn power(gpu: &GpuStatus) -> Option<String> {
    let nvml = gpu.nvml.as_ref()?;
    let watts = |mw: u32| (f64::from(mw) / 1e3).round();
    let draw = nvml.power_mw.map(|mw| match nvml.power_limit_mw {
        Some(limit) => format!("{} of {} W", watts(mw), watts(limit)),
        None => format!("{} W", watts(mw)),
    });
    let busy = nvml.utilisation_percent.map(|percent| format!("busy {percent}%"));
    let errors = (nvml.xid_errors > 0).then(|| format!("{} XID errors", nvml.xid_errors));
    let parts: Vec<_> = [draw, busy, errors].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Describes the GPU's memory by kind. All workers of a model share one copy of its weights.
/// `other` includes CUDA contexts, kernels, CUDA graphs, and the memory of other programs.
fn memory(snapshot: &TopSnapshot, gpu: &GpuStatus) -> String {
    let of_model = |model: &TopModel| {
        let memories = model.status.workers.iter().filter_map(|worker| worker.report.memory);
        memories.fold((0, 0), |(weights, scratch), memory| {
            (memory.weights_mib.max(weights), scratch + memory.scratch_mib)
        })
    };
    let (weights, scratch) =
        snapshot.on(gpu.index).map(of_model).fold((0, 0), |sum, model| (sum.0 + model.0, sum.1 + model.1));
    let kinds = format!("memory weights {}, scratch {}", figures::mib(weights), figures::mib(scratch));
    match gpu.nvml.as_ref().and_then(|nvml| nvml.memory) {
        Some(memory) => {
            let other = memory.used_mib.saturating_sub(weights + scratch);
            let gib = |mib: u64| mib as f64 / 1024.0;
            let (free, total) = (gib(memory.free_mib), gib(memory.total_mib));
            format!("{kinds}, other {}, free {free:.1} of {total:.1} GiB", figures::mib(other))
        }
        None if weights + scratch > 0 => kinds,
        None => "memory unknown".to_owned(),
    }
}

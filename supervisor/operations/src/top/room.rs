//! The distribution of a screen's lines among its parts.

/// The lines that each part would fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineNeeds {
    pub(super) models: usize,
    /// The lines of the GPUs in full.
    pub(super) full_gpus: usize,
    /// The lines of the GPUs with one line each.
    pub(super) short_gpus: usize,
    pub(super) details: usize,
}

/// The lines that each part gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineBudget {
    /// The rows of the table of models, without its head.
    pub(super) models: usize,
    pub(super) gpus: usize,
    pub(super) full_gpus: bool,
    pub(super) details: usize,
}

/// The rows of the table that come before all lines of the GPUs.
const FIRST_MODELS: usize = 5;
/// The lines of the details that come before all lines of the GPUs.
const FIRST_DETAILS: usize = 7;

/// Distributes `lines`, which excludes the title, the table's head and the last line.
pub(super) fn distribute(lines: usize, needs: LineNeeds) -> LineBudget {
    let models = needs.models.min(FIRST_MODELS);
    let details = needs.details.min(FIRST_DETAILS);
    let full_gpus = models + details + needs.full_gpus <= lines;
    let gpus = if full_gpus { needs.full_gpus } else { needs.short_gpus };
    // If not everything fits, models come first, then details, then GPUs.
    let models = models.min(lines);
    let gpus = gpus.min(lines.saturating_sub(models + details));
    let details = needs.details.min(lines - models - gpus);
    let spare = lines - models - gpus - details;
    let models = needs.models.min(models + spare);
    // The rows of models take precedence over more than the first details.
    let more = (needs.models - models).min(details.saturating_sub(FIRST_DETAILS));
    LineBudget { models: models + more, gpus, full_gpus, details: details - more }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_use_all_lines_while_one_needs_more() {
        for lines in 0..60 {
            for (models, gpus, details) in
                [(0, 0, 0), (1, 1, 9), (3, 1, 12), (20, 1, 12), (20, 8, 9), (2, 4, 30)]
            {
                let needs = LineNeeds { models, full_gpus: gpus * 3, short_gpus: gpus, details };
                let room = distribute(lines, needs);
                let used = room.models + room.gpus + room.details;
                assert!(used <= lines, "{lines} {needs:?} {room:?}");
                assert!(room.models <= models && room.details <= details, "{lines} {needs:?} {room:?}");
                let short = room.models < models || room.details < details;
                assert!(used == lines || !short, "{lines} {needs:?} {room:?}");
                assert!(room.models > 0 || lines == 0 || models == 0, "{lines} {needs:?} {room:?}");
            }
        }
    }

    #[test]
    fn on_a_usual_terminal_one_gpu_is_shown_in_full_and_many_by_a_line_each() {
        let room = |models, gpus| {
            distribute(21, LineNeeds { models, full_gpus: gpus * 3, short_gpus: gpus, details: 11 })
        };
        assert_eq!(room(2, 1), LineBudget { models: 2, gpus: 3, full_gpus: true, details: 11 });
        assert_eq!(room(20, 1), LineBudget { models: 11, gpus: 3, full_gpus: true, details: 7 });
        assert_eq!(room(20, 8), LineBudget { models: 6, gpus: 8, full_gpus: false, details: 7 });
    }
}

//! Distributes the lines of the screen among the parts of the screen.

/// The number of lines that each part needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineNeeds {
    pub(super) models: usize,
    /// The number of lines if every GPU is described completely.
    pub(super) full_gpus: usize,
    /// The number of lines if every GPU gets one line.
    pub(super) short_gpus: usize,
    pub(super) details: usize,
}

/// The number of lines that each part gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineBudget {
    /// The number of rows in the table of models, without the table's head.
    pub(super) models: usize,
    pub(super) gpus: usize,
    pub(super) full_gpus: bool,
    pub(super) details: usize,
}

/// The number of table rows that take precedence over the lines of the GPUs.
const FIRST_MODELS: usize = 5;
/// The number of detail lines that take precedence over the lines of the GPUs.
const FIRST_DETAILS: usize = 7;

/// Distributes the lines. `lines` does not include the title, the table's head and the last line.
pub(super) fn distribute(lines: usize, needs: LineNeeds) -> LineBudget {
    let models = needs.models.min(FIRST_MODELS);
    let details = needs.details.min(FIRST_DETAILS);
    let full_gpus = models + details + needs.full_gpus <= lines;
    let gpus = if full_gpus { needs.full_gpus } else { needs.short_gpus };
    // If there are too few lines, the models take precedence over the details. The details take
    // precedence over the GPUs.
    let models = models.min(lines);
    let gpus = gpus.min(lines.saturating_sub(models + details));
    let details = needs.details.min(lines - models - gpus);
    let spare = lines - models - gpus - details;
    let models = needs.models.min(models + spare);
    // After the first `FIRST_DETAILS` lines of details, further rows of models take precedence over
    // further details.
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

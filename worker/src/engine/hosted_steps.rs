//! Recorded steps of a hosted model.

use shadowslice_shared::batch::{RunFailure, StreamStep};

use super::StreamResult;
use super::hosted::Hosted;
use super::recorded::fitting_step;
use crate::answer::AnswerSlot;

impl Hosted {
    /// Runs a recorded step. Returns `None` if the model or this number of streams is not recorded.
    pub(super) fn replay_step(
        &mut self,
        step: &StreamStep,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<Option<Vec<StreamResult>>, RunFailure> {
        let Some(index) = fitting_step(&self.recorded, step.streams.len()) else { return Ok(None) };
        let (Some(gpu), Some(seats)) = (&self.gpu, self.host.seats(&step.streams)) else { return Ok(None) };
        let ran = self
            .executable(index, step.groups)
            .and_then(|executable| self.recorded[index].step(gpu, executable, step, &seats));
        // After a failure, the graph may have changed the states, so no stream can continue.
        let ran = ran.inspect_err(|_| self.host.end_streams(&step.streams))?;
        let results: Vec<StreamResult> = (0..step.streams.len()).map(|row| ran.answer(row, slot)).collect();
        let has_ended = |result: &StreamResult| !result.as_ref().is_ok_and(|answer| answer.more);
        let ended = step.streams.iter().zip(&results).filter(|(_, result)| has_ended(result));
        let ended: Vec<u64> = ended.map(|(&stream, _)| stream).collect();
        if !ended.is_empty() {
            self.host.end_streams(&ended);
        }
        Ok(Some(results))
    }
}

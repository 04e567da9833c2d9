//! The shapes of a batch's inputs.

use crate::inputs::Inputs;

/// The shapes of a batch's inputs. Batches of the same shapes can use the same CUDA graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InputShapes {
    /// The number of rows, or `None` if the model has no batch axis.
    pub(super) rows: Option<u32>,
    /// The shape of each input, without the batch axis.
    shapes: Vec<Vec<i64>>,
}

impl InputShapes {
    pub(super) fn of(inputs: &Inputs<'_>) -> Self {
        let shapes = (0..inputs.specs().len()).map(|input| inputs.row_shape(input).to_vec());
        Self { rows: inputs.rows(), shapes: shapes.collect() }
    }

    /// Returns the shape of the only input of a step of `streams` streams: a number for each stream.
    pub(super) fn of_step(streams: usize) -> Self {
        Self { rows: Some(u32::try_from(streams).unwrap_or(u32::MAX)), shapes: vec![Vec::new()] }
    }

    pub(super) fn rows(&self) -> u32 {
        self.rows.unwrap_or(1)
    }

    /// Returns the shapes, including the batch axis.
    pub(super) fn with_batch_axis(&self) -> Vec<Vec<i64>> {
        let rows = self.rows.map(i64::from);
        self.shapes.iter().map(|row| rows.into_iter().chain(row.iter().copied()).collect()).collect()
    }

    /// Returns true if a batch of the shapes `other` fits into the tensors of these shapes. The
    /// batch may need padding rows.
    pub(super) fn holds(&self, other: &Self) -> bool {
        self.rows >= other.rows && self.shapes == other.shapes
    }
}

"""Fits a classifier of irises, and writes it to this folder. model.py reads it from there."""

from pathlib import Path

import joblib
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

irises = load_iris()
classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
classifier.fit(irises.data, irises.target_names[irises.target])
joblib.dump(classifier, Path(__file__).with_name("classifier.joblib"))

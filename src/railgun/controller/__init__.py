"""The lifecycle controller: the one component that orders what happens to a job."""

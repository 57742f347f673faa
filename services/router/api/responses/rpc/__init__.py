"""Stored responses over gRPC: ResponseService, and the answers of Generate that are stored or go on.

What is stored is what `/v1/responses` stores. It must not import the routes of HTTP.
"""
